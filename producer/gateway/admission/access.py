"""What the caller of a request may do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from inferq.producer.gateway.errors import PERMISSION, HttpError
from inferq.protocol.keys import Lane


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key, over all gateways; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None

    @property
    def are_none(self) -> bool:
        """Whether nothing is limited."""
        return self == _NO_LIMITS


_NO_LIMITS: Final = KeyLimits()


@dataclass(frozen=True, slots=True)
class Access:
    """The caller of a request: `key_id` is the key's name, None where no keys are asked for."""

    key_id: str | None = None
    limits: KeyLimits = _NO_LIMITS
    #: Names of models it may use; None: all.
    models: frozenset[str] | None = None
    #: Lanes it may use; None: all.
    lanes: frozenset[Lane] | None = None

    def may_use(self, model: str) -> bool:
        """Whether the key may use a model."""
        return self.models is None or model in self.models

    def check_model(self, model: str) -> None:
        """Raise a 403 unless the key may use the model."""
        if not self.may_use(model):
            raise HttpError(
                403,
                f"This API key may not use the model {model!r}.",
                type=PERMISSION,
                param="model",
                code="model_not_allowed",
            )

    def check_lane(self, lane: Lane, *, param: str = "service_tier") -> None:
        """Raise a 403 unless the key may use the lane; `param` is what asked for it."""
        if self.lanes is not None and lane not in self.lanes:
            allowed = ", ".join(each for each in Lane if each in self.lanes)
            raise HttpError(
                403,
                f"This API key may not use the {lane} lane; it may use: {allowed}.",
                type=PERMISSION,
                param=param,
                code="lane_not_allowed",
            )


#: Of a gateway without keys.
ANYONE: Final = Access()
