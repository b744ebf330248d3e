"""A stand-in worker as a process of its own, to be killed: URL, queue, model's folder, name."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from stand_in_worker import StandInWorker, load_tokenizer


def main(url: str, queue: str, model: str, name: str) -> None:
    worker = StandInWorker(
        # slow enough to be killed in the middle of what it does
        url,
        queue,
        load_tokenizer(Path(model)),
        name=name,
        step_s=0.1,
        lease_s=3.0,
    )
    worker.start().say("Hello there")
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
