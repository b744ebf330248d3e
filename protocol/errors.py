"""The exception tree of inferq, and the typed reasons that travel in events.

InferqError
├── InvalidRequestError(field, limit)      bad input; also a ValueError
├── DecodeError(payload)                   bytes that are not a message of this protocol
├── ProtocolVersionError(version)          a message of an unknown major version
├── QueueFull(depth, limit)                back-pressure: try again later
├── IdempotencyConflict(key)               same key, another payload
├── JobError(job_id)
│   ├── JobFailed(info)                    terminal event `error`
│   ├── JobCancelled                       terminal event `cancelled`
│   ├── JobExpired                         terminal event `expired`
│   ├── JobNotFound                        no such job, or no longer known
│   ├── StreamExpired                      its events are gone from the server
│   └── StreamGap(expected, found)         some of its events are missing in the middle
├── ResultTimeout(job_id, timeout_s)       also a TimeoutError
├── ServerLost(url)                        Redis cannot be reached, or refuses us
├── ModelError(field)                      a model folder that cannot be served
└── MissingExtraError(extra)               also an ImportError; names the install command
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A failure as it travels in a terminal event.

    `code` is stable and for programs (one of `ErrorCode`'s values), `message` for people; `field`
    names the offending input and `limit` the bound that it broke, where there are such.
    """

    code: str
    message: str
    field: str | None = None
    limit: str | None = None


class ErrorCode:
    """The values of `ErrorInfo.code`."""

    #: The request can never be served as it is.
    INVALID_REQUEST = "invalid_request"
    #: The prompt leaves no room for output in the model's context.
    CONTEXT_LENGTH = "context_length_exceeded"
    #: The payload is not a message of this protocol.
    UNDECODABLE = "undecodable"
    #: The payload has a major version that the worker does not speak.
    UNSUPPORTED_VERSION = "unsupported_version"
    #: The model asked for is not served on this queue.
    MODEL_NOT_FOUND = "model_not_found"
    #: The workers that ran the job died, as often as is allowed.
    WORKER_CRASHED = "worker_crashed"
    #: A fault of the worker's own.
    INTERNAL = "internal_error"

    #: Those of a request that fails the same way wherever it runs.
    REFUSED = frozenset({INVALID_REQUEST, MODEL_NOT_FOUND, CONTEXT_LENGTH})


class InferqError(Exception):
    """The root of all errors that inferq raises on purpose."""


class InvalidRequestError(InferqError, ValueError):
    """Input that can never be served; `field` names it, `limit` the bound it broke."""

    def __init__(
        self,
        message: str,
        *,
        field: str,
        limit: str | int | float | None = None,
        code: str = ErrorCode.INVALID_REQUEST,
    ) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.limit = None if limit is None else str(limit)
        self.code = code

    @property
    def info(self) -> ErrorInfo:
        """The error as it travels in a terminal event."""
        return ErrorInfo(self.code, str(self), self.field, self.limit)

    @property
    def reason(self) -> str:
        """The message without the field that it begins with."""
        return str(self).removeprefix(f"{self.field}: ")

    def of_field(self, field: str) -> InvalidRequestError:
        """Return the same error of another field: what the input is called where it came from."""
        return InvalidRequestError(self.reason, field=field, limit=self.limit, code=self.code)


class DecodeError(InferqError):
    """Bytes that are not a message of this protocol; `payload` holds them (at most 1 KiB)."""

    def __init__(self, message: str, payload: bytes = b"") -> None:
        super().__init__(message)
        self.payload = payload[:1024]


class ProtocolVersionError(DecodeError):
    """A message of a major version that we do not speak."""

    def __init__(self, version: object, supported: int) -> None:
        super().__init__(
            f"protocol version {version!r} is not supported; this side speaks {supported}"
        )
        self.version = version


class QueueFull(InferqError):
    """The queue holds as many jobs as it may, or the server is out of memory."""

    def __init__(self, message: str, *, depth: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.depth = depth
        self.limit = limit


class IdempotencyConflict(InferqError):
    """The idempotency key is in use for a job with another payload."""

    def __init__(self, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency_key {key!r} already belongs to job {job_id}, whose payload differs"
        )
        self.key = key
        self.job_id = job_id


class JobError(InferqError):
    """A job that ended, or can be followed, in no useful way."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobError):
    """The job ended with an error; `info` says which."""

    def __init__(self, job_id: str, info: ErrorInfo) -> None:
        super().__init__(job_id, f"job {job_id} failed: {info.message} [{info.code}]")
        self.info = info


class JobCancelled(JobError):
    """The job was cancelled."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"job {job_id} was cancelled")


class JobExpired(JobError):
    """The job's deadline passed before it finished."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"job {job_id} expired: its deadline passed before it finished")


class JobNotFound(JobError):
    """No such job: never submitted here, or its record has expired."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"job {job_id} is not known to the server")


class StreamExpired(JobError):
    """The job's events are no longer on the server (expired, or the server was emptied)."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id, f"the events of job {job_id} are no longer on the server")


class StreamGap(JobError):
    """Events are missing in the middle of the stream: tokens `expected` to `found` - 1."""

    def __init__(self, job_id: str, expected: int, found: int) -> None:
        super().__init__(
            job_id, f"the events of job {job_id} go on at token {found} instead of {expected}"
        )
        self.expected = expected
        self.found = found


class ResultTimeout(InferqError, TimeoutError):
    """Nothing (more) came within the time allowed; the job itself goes on."""

    def __init__(self, job_id: str, timeout_s: float) -> None:
        super().__init__(
            f"job {job_id}: no result within {timeout_s:.15g} s; the job itself goes on"
        )
        self.job_id = job_id
        self.timeout_s = timeout_s


class ServerLost(InferqError):
    """The Redis server cannot be reached, went away, or (`is_refusal`) does not let us do this."""

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal


class ModelError(InferqError):
    """A model that cannot be served: missing, malformed, unsupported, or too large."""

    def __init__(self, message: str, *, field: str = "model") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class MissingExtraError(InferqError, ImportError):
    """A part of inferq that is not installed; the message holds the install command."""

    def __init__(self, extra: str, missing: str) -> None:
        super().__init__(f"{missing} is not installed; run: pip install 'inferq[{extra}]'")
        self.extra = extra
