"""What a model runner raises when a step cannot be sampled."""

from __future__ import annotations

from inferq.protocol.errors import InferqError


class NonFiniteLogitsError(InferqError):
    """The model gave NaN or infinite logits for `request_ids`; nothing of the step was sampled.

    The other requests of the step are sound: without the named ones it can be run again.
    """

    def __init__(self, request_ids: tuple[str, ...]) -> None:
        super().__init__(f"the model's logits are not finite for {', '.join(request_ids)}")
        self.request_ids = request_ids
