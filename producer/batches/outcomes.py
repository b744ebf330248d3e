"""How a line of input ended, as a line of the output or of the error file, in OpenAI's shape."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import orjson

from inferq.producer.gateway.errors import HttpError
from inferq.protocol.messages import Usage


@dataclass(frozen=True, slots=True)
class Answered:
    """What the gateway would have answered: a status, a body, and the id of the first job."""

    status: int
    body: dict[str, Any]
    request_id: str | None = None
    usage: Usage | None = None
    #: The jobs that it took, whose events nobody needs once this is kept.
    job_ids: tuple[str, ...] = ()

    @classmethod
    def refused(cls, error: HttpError, job_ids: tuple[str, ...] = ()) -> Answered:
        """Return an error as an answer."""
        return cls(error.status, error.body, job_ids[0] if job_ids else None, None, job_ids)

    @property
    def is_success(self) -> bool:
        """Whether it belongs to the output file."""
        return self.status < 400


@dataclass(frozen=True, slots=True)
class Unanswered:
    """Why a line was not asked at all, or has no answer."""

    code: str
    message: str
    job_ids: tuple[str, ...] = ()

    @property
    def is_success(self) -> bool:
        """It never is."""
        return False


Outcome = Answered | Unanswered


def encode_outcome(batch_id: str, number: int, custom_id: str | None, outcome: Outcome) -> bytes:
    """Return a line, its end included; its id is the same whenever it is made."""
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    request_id = hashlib.sha256(f"{batch_id}\n{number}".encode()).hexdigest()[:32]
    if isinstance(outcome, Answered):
        response = {
            "status_code": outcome.status,
            "request_id": outcome.request_id or f"req_{request_id}",
            "body": outcome.body,
        }
    else:
        error = {"code": outcome.code, "message": outcome.message}
    entry = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
