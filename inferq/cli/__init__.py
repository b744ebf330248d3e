"""The command line: `inferq COMMAND`; see `exit_codes` for how each run ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from inferq.cli import exit_codes
from inferq.cli.extras import load_extra
from inferq.cli.parser import build_parser
from inferq.protocol.errors import InferqError

__all__ = ["main"]


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
    if arguments[:1] == ["worker"]:
        # its flags come from its settings, which need the extra
        return int(load_extra("inferq.worker.command", extra="worker").main(arguments[1:]))
    chosen = build_parser().parse_args(arguments)
    code: int = chosen.run(chosen)
    return code
