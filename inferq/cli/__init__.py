"""The command line: `inferq COMMAND`; see `exit_codes` for how each run ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from inferq.cli import exit_codes
from inferq.protocol.errors import InferqError

__all__ = ["main"]

#: Commands whose flags come from their settings: the module to run, and the extra that it needs.
_WITH_OWN_FLAGS: Final = {
    "gateway": ("inferq.producer.gateway.command", "gateway"),
    "serve": ("inferq.cli.serve", "worker,gateway,gguf,embedded"),
    "tasks": ("inferq.producer.tasks.command", "tasks"),
    "worker": ("inferq.worker.command", "worker"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; expected errors never show a traceback."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except InferqError as error:
        print(f"inferq: {error}", file=sys.stderr)
        return exit_codes.exit_code_of(error)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only add a traceback
        print("inferq: interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # the interpreter flushes standard output once more at its end: let that go nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.PIPE_CLOSED
    return code


def _dispatch(arguments: list[str]) -> int:
    # Imported here, so that an interruption while all commands load is one like any other.
    from inferq.cli.extras import load_extra
    from inferq.cli.parser import build_parser

    if arguments and arguments[0] in _WITH_OWN_FLAGS:
        module, extra = _WITH_OWN_FLAGS[arguments[0]]
        return int(load_extra(module, extra=extra).main(arguments[1:]))
    chosen = build_parser().parse_args(arguments)
    code: int = chosen.run(chosen)
    return code
