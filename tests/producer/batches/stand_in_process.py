"""A stand-in worker as a process of its own, to be killed: URL, queue, model's folder, name."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path


def main(url: str, queue: str, model: str, name: str) -> None:
    path = Path(__file__).parents[1] / "gateway" / "stand_in.py"
    spec = importlib.util.spec_from_file_location("gateway_stand_in", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    worker = module.StandInWorker(
        url, queue, module.load_tokenizer(Path(model)), name=name, step_s=0.02, lease_s=3.0
    )
    worker.start().say("Hello there")
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
