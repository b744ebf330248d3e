"""A worker's command that never gets further than what its first argument names.

`fetch`: the model comes from a hub whose downloads do not end, in threads as the hub's client has
them. `tokenize`: no prompt is ever tokenized, by a tokenizer of the folder that `--model` names;
its engine is the counting one. It says on standard output when it is there.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from inferq.cli import main
from inferq.worker import service
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.pipe.engine_client import EngineClient


def block(*_: Any, **__: Any) -> NoReturn:
    print("blocked", flush=True)
    threading.Event().wait()
    raise AssertionError


def fetch(*_: Any) -> NoReturn:
    with ThreadPoolExecutor() as executor:
        executor.submit(block).result()
    raise AssertionError


def run(where: str, arguments: list[str]) -> int:
    engine = Path(__file__).parent / "counting_engine.py"
    service.EngineClient = partial(EngineClient, [sys.executable, str(engine)])  # type: ignore[misc, assignment]
    if where == "fetch":
        service.find_model_folder = fetch
    else:
        Tokenizer.encode = block  # type: ignore[method-assign]
    return main(["worker", *arguments])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
