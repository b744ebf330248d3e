"""What the exit codes of `inferq` mean, and which error gives which."""

from __future__ import annotations

from typing import Final

from inferq.protocol.errors import (
    IdempotencyConflict,
    InferqError,
    InvalidRequestError,
    MissingExtraError,
    ModelError,
    QueueFull,
    ResultTimeout,
    ServerLost,
)

OK: Final = 0
#: The job failed, was cancelled, expired, or is not known (any more).
FAILED: Final = 1
BAD_INPUT: Final = 2
SERVER_LOST: Final = 3
TIMED_OUT: Final = 4
QUEUE_FULL: Final = 5
#: Ctrl-C, as a shell reports SIGINT.
INTERRUPTED: Final = 130
#: Whoever read our output went away, as a shell reports SIGPIPE.
PIPE_CLOSED: Final = 141

HELP: Final = """\
Exit codes: 0 done; 1 the job failed, was cancelled, expired or is not known; 2 bad input;
3 the Redis server cannot be reached or refuses us; 4 time-out (the job goes on); 5 the queue is
full; 130 interrupted by Ctrl-C (the job goes on).
"""


def exit_code_of(error: InferqError) -> int:
    """Return the exit code for an error."""
    match error:
        case InvalidRequestError() | IdempotencyConflict() | ModelError() | MissingExtraError():
            return BAD_INPUT
        case ServerLost():
            return SERVER_LOST
        case ResultTimeout():
            return TIMED_OUT
        case QueueFull():
            return QUEUE_FULL
        case _:
            return FAILED
