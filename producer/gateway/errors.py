"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}` with its status."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import structlog

from inferq.protocol.errors import (
    ErrorCode,
    IdempotencyConflict,
    InferqError,
    InvalidRequestError,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    QueueFull,
    ResultTimeout,
    ServerLost,
    StreamExpired,
)

logger = structlog.get_logger("inferq.gateway")

#: Status, which nobody reads, where the client went away before there was an answer.
CLIENT_GONE: Final = 499
INVALID_REQUEST: Final = "invalid_request_error"
PERMISSION: Final = "permission_error"
RATE_LIMIT: Final = "rate_limit_error"
SERVER: Final = "server_error"

#: Seconds after which to try again when nothing better is known.
DEFAULT_RETRY_S: Final = 5
#: Shortest and longest Retry-After, in seconds.
RETRY_RANGE_S: Final = (1, 600)
#: Names of models in an error, at most.
_SHOWN_MODELS: Final = 20
#: What the SDK calls a field and OpenAI another; the rest have one name.
_FIELD_NAMES: Final[Mapping[str, str]] = {
    "beam_width": "use_beam_search",
    "deadline": "X-Inferq-Deadline",
    "deadline_s": "X-Inferq-Deadline",
    "idempotency_key": "Idempotency-Key",
    "job": "body",
    "job_id": "id",
    "lane": "service_tier",
    "num_logprobs": "logprobs",
}
#: Those of them that no message holds as a word of another meaning.
_RENAMED: Final = re.compile(r"\b(?:beam_width|deadline_s|idempotency_key|job_id|num_logprobs)\b")
#: What tells OpenAI's clients, which would go by the status, whether to send the request again.
SHOULD_RETRY: Final = "x-should-retry"
#: Statuses after which the same request may be served; after any other, a repeat would fail the
#: same way, or be a second job beside one that goes on or was ended on purpose.
_RETRIED: Final = frozenset({408, 429, 503})


class HttpError(Exception):
    """An answer that is an error; `param` names the offending field, `code` is for programs.

    Its headers tell OpenAI's clients whether to send the request again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,  # noqa: A002 - OpenAI's name
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = {SHOULD_RETRY: str(status in _RETRIED).lower(), **(headers or {})}

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body, also sent as an event of a stream that fails."""
        shown = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": shown}


class BadRequest(HttpError):
    """400: the request can never be served as it is."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


class ModelNotServed(HttpError):
    """404: no queue of this gateway serves the model; the message lists those that are."""

    def __init__(self, model: str, served: Iterable[str]) -> None:
        names = sorted(served)
        shown = ", ".join(names[:_SHOWN_MODELS]) + (", …" if len(names) > _SHOWN_MODELS else "")
        super().__init__(
            404,
            f"The model {model[:256]!r} does not exist. Served are: {shown or 'none'}.",
            param="model",
            code="model_not_found",
        )


class NoWorker(HttpError):
    """503: the model's workers are away."""

    def __init__(self, message: str, *, retry_after_s: float = DEFAULT_RETRY_S) -> None:
        super().__init__(
            503, message, type=SERVER, code="no_worker", headers=retry_after(retry_after_s)
        )


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header that says when to try again: whole seconds in [1, 600]."""
    low, high = RETRY_RANGE_S
    return {"Retry-After": str(min(high, max(low, math.ceil(seconds))))}


def to_http_error(error: Exception, *, retry_after_s: float = DEFAULT_RETRY_S) -> HttpError:
    """Return any error as an answer; what nobody foresaw is logged and shows nothing of itself.

    `retry_after_s` is how long a full queue needs to have room again; see `Directory.retry_after`.
    """
    match error:
        case HttpError():
            return error
        case InvalidRequestError():
            return _of_invalid(error.code, str(error), error.field)
        case QueueFull():
            return HttpError(
                429,
                f"The queue is full: {error}. Try again later.",
                type=RATE_LIMIT,
                code="queue_full",
                headers=retry_after(retry_after_s),
            )
        case ServerLost():
            logger.error("server lost", error=str(error))
            return HttpError(
                503,
                "The queue's server cannot be reached. Try again.",
                type=SERVER,
                code="server_lost",
                headers=retry_after(DEFAULT_RETRY_S),
            )
        case InferqError():
            return _of_job(error)
    logger.error("unforeseen error", fault=error)
    return _internal()


def _of_job(error: InferqError) -> HttpError:
    match error:
        case IdempotencyConflict():
            message = _in_our_words(str(error))
            return HttpError(409, message, param="Idempotency-Key", code="idempotency_conflict")
        case JobNotFound() | StreamExpired():
            return HttpError(404, str(error), param="id", code="job_not_found")
        case JobExpired():
            return HttpError(504, str(error), type=SERVER, code="deadline_exceeded")
        case ResultTimeout():
            return HttpError(504, str(error), type=SERVER, code="timeout")
        case JobCancelled():
            return HttpError(409, str(error), code="cancelled")
        case JobFailed():
            return _of_failed(error)
    logger.error("unforeseen error", fault=error)
    return _internal()


def _of_failed(error: JobFailed) -> HttpError:
    info = error.info
    if info.code in ErrorCode.REFUSED:
        return _of_invalid(info.code, info.message, info.field)
    # not the message: it may hold what was asked
    logger.error("job failed", job_id=error.job_id, code=info.code)
    if info.code == ErrorCode.WORKER_CRASHED:
        message = f"Job {error.job_id} failed: the workers that ran it crashed."
        return HttpError(500, message, type=SERVER, code=info.code)
    return HttpError(500, f"Job {error.job_id} failed.", type=SERVER, code=info.code)


def _of_invalid(code: str, message: str, field: str | None) -> HttpError:
    name = None if field is None else _FIELD_NAMES.get(field, field)
    text = _in_our_words(message.removeprefix(f"{field}: "))
    shown = text if name is None else f"{name}: {text}"
    if code == ErrorCode.MODEL_NOT_FOUND:
        return HttpError(404, shown, param="model", code="model_not_found")
    return BadRequest(shown, param=name, code=None if code == ErrorCode.INVALID_REQUEST else code)


def _in_our_words(message: str) -> str:
    return _RENAMED.sub(lambda found: _FIELD_NAMES[found[0]], message)


def _internal() -> HttpError:
    return HttpError(500, "The gateway had an internal error.", type=SERVER, code="internal_error")
