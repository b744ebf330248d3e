"""Sampling parameters: what a request may ask of the sampler, checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from inferq.protocol.errors import InvalidRequestError

#: Below this temperature sampling is greedy (as in vLLM).
GREEDY_TEMPERATURE: Final = 1e-5
MAX_SEED: Final = 2**63 - 1
#: Most stop strings or stop token ids of one request.
MAX_STOPS: Final = 64
#: Longest stop string, in characters.
MAX_STOP_LENGTH: Final = 1024
#: Most alternatives per position in `logprobs`.
MAX_LOGPROBS: Final = 20
#: Largest `max_tokens` and `min_tokens`: beyond any context length in use.
MAX_TOKENS_LIMIT: Final = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; immutable and validated.

    Names and meaning follow vLLM's class of the same name. Raises `InvalidRequestError`, which
    names the field and the limit, on any value out of range.

    - `temperature`: 0 is greedy, as is anything below 1e-5.
    - `top_k`: keep the k most likely tokens; 0 or -1 keeps all.
    - `top_p`: of those, keep the smallest set whose probability reaches p, in (0, 1].
    - `min_p`: drop tokens less likely than `min_p` times the most likely, in [0, 1].
    - `seed`: same seed, same tokens, whatever the batch; None draws one at submission.
    - `max_tokens`: most tokens to generate; None goes on to the end of the context.
    - `min_tokens`: no end token or stop string counts before this many.
    - `stop`: strings that end the text (a string or a list); the text ends before the earliest.
    - `stop_token_ids`: tokens that end the text, besides the model's own end tokens.
    - `include_stop_str_in_output`: keep the stop string in the text.
    - `ignore_eos`: go on past the model's end tokens.
    - `logprobs`: return this many most likely tokens per position (and the chosen one).
    - `skip_special_tokens`: leave special tokens out of the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"{self.min_tokens} is more than max_tokens ({self.max_tokens})",
                field="min_tokens",
                limit=self.max_tokens,
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError("must be true or false", field=name)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    def to_wire(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, by name."""
        wire: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                wire[f.name] = list(value) if isinstance(value, tuple) else value
        return wire

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> SamplingParams:
        """Rebuild from `to_wire`'s form.

        An unknown name is an error, not ignored: the answer would silently differ from the one
        asked for.
        """
        unknown = sorted(set(wire) - {f.name for f in fields(cls)})
        if unknown:
            raise InvalidRequestError(
                "is not a sampling parameter that this version supports",
                field=f"params.{unknown[0]}",
            )
        return cls(**wire)


def _number(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    bound = f"{'(' if above_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError(
            f"must be a finite number in {bound}, not {value!r}", field=field, limit=bound
        )
    if not low <= value <= high or (above_low and value == low):
        raise InvalidRequestError(f"{value} is not in {bound}", field=field, limit=bound)


def _integer(field: str, value: object, low: int, high: int) -> None:
    bound = f"[{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"must be a whole number in {bound}, not {value!r}", field=field, limit=bound
        )
    if not low <= value <= high:
        raise InvalidRequestError(f"{value} is not in {bound}", field=field, limit=bound)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, (list, tuple)):
        raise InvalidRequestError("must be a string or a list of strings", field="stop")
    if len(strings) > MAX_STOPS:
        raise InvalidRequestError(
            f"{len(strings)} strings are more than {MAX_STOPS}", field="stop", limit=MAX_STOPS
        )
    for s in strings:
        if not isinstance(s, str) or not s:
            raise InvalidRequestError("every stop must be a string that is not empty", field="stop")
        if len(s) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"a stop of {len(s)} characters is longer than {MAX_STOP_LENGTH}",
                field="stop",
                limit=MAX_STOP_LENGTH,
            )
        check_utf8("stop", s)
    return tuple(strings)


def _stop_token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequestError("must be a list of token ids", field="stop_token_ids")
    if len(ids) > MAX_STOPS:
        raise InvalidRequestError(
            f"{len(ids)} ids are more than {MAX_STOPS}", field="stop_token_ids", limit=MAX_STOPS
        )
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(ids)


def check_utf8(field: str, text: str) -> bytes:
    """Return `text` in UTF-8; raise `InvalidRequestError` where it holds lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"is not valid Unicode (a lone surrogate at character {error.start})", field=field
        ) from None
