"""What a model runner raises when some requests of a step cannot be sampled."""

from __future__ import annotations

from collections.abc import Mapping

from inferq.protocol.errors import ErrorCode, ErrorInfo, InferqError


class FailedRequestsError(InferqError):
    """Requests of a step that cannot go on, and why; nothing of the step was sampled.

    The other requests are sound: without the named ones the step can be run again. Its block moves
    are done.
    """

    def __init__(self, failed: Mapping[str, ErrorInfo]) -> None:
        super().__init__("; ".join(f"{name}: {info.message}" for name, info in failed.items()))
        self.failed = dict(failed)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The failed requests."""
        return tuple(self.failed)


class NonFiniteLogitsError(FailedRequestsError):
    """The model gave NaN or infinite logits for `request_ids`."""

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        info = ErrorInfo(ErrorCode.INTERNAL, "the model's logits are not finite")
        super().__init__(dict.fromkeys(request_ids, info))
