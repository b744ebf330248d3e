"""Sampling parameters: what a request may ask of the sampler, checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.param_checks import (
    check_boolean,
    check_integer,
    check_number,
    check_optional_integer,
    strings,
    token_biases,
    token_ids,
)
from inferq.protocol.structured import StructuredOutputs

#: Below this temperature sampling is greedy (as in vLLM).
GREEDY_TEMPERATURE: Final = 1e-5
MAX_SEED: Final = 2**63 - 1
#: Most outputs, candidates or beams of one request.
MAX_OUTPUTS: Final = 128
#: Most stop strings or stop token ids of one request.
MAX_STOPS: Final = 64
#: Longest stop string, in characters.
MAX_STOP_LENGTH: Final = 256
#: Most bad words of one request, and their longest, in characters.
MAX_BAD_WORDS: Final = 64
MAX_BAD_WORD_LENGTH: Final = 256
#: Most entries of `logit_bias`; OpenAI's bound of each bias.
MAX_BIASES: Final = 1024
MAX_BIAS: Final = 100.0
#: Most entries of `allowed_token_ids`: a whole vocabulary of any model in use.
MAX_ALLOWED: Final = 2**18
#: Most alternatives per position in `logprobs`, besides -1, which is the whole vocabulary.
MAX_LOGPROBS: Final = 20
#: Largest `max_tokens` and `min_tokens`: beyond any context length in use.
MAX_TOKENS_LIMIT: Final = 2**24


#: Parameters for which a model may recommend values of its own, used where none was given.
MODEL_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class _NotGivenFloat(float):
    """A default that can be told from the same number given by the user."""


class _NotGivenInt(int):
    """A default that can be told from the same number given by the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end; immutable and validated.

    Names and meaning follow vLLM's class of the same name. `temperature`, `top_k`, `top_p`,
    `min_p` and `repetition_penalty` are the model's own where they are not given and its
    generation_config.json has them (a worker may switch that off). Raises
    `InvalidRequestError`, which names the field and the limit, on any value out of range.

    Outputs
    - `n`: outputs to return. `best_of`: outputs to generate, of which the `n` with the highest
      sum of log-probabilities are returned, best first.
    - `beam_width`: search with this many beams instead of sampling, and return the best `n`;
      `length_penalty` and `early_stopping` as in transformers. Not with `structured_outputs`.
    - `seed`: same seed, same tokens, whatever the batch; None draws one at submission.

    Choice of a token, in this order
    - `allowed_token_ids`: only these, at least one; None is all. `structured_outputs`: only what
      keeps the form.
    - `bad_words`: never these texts. `min_tokens`: no end before this many tokens.
    - `logit_bias`: added to the logits of these tokens, in [-100, 100].
    - `repetition_penalty`: divides the positive and multiplies the negative logits of tokens in
      prompt or output. `presence_penalty`, `frequency_penalty`: subtracted once, or once for each
      time, from the logits of tokens in the output; in [-2, 2].
    - `temperature`: 0 is greedy, as is anything below 1e-5.
    - `min_p`: drop tokens less likely than `min_p` times the most likely, in [0, 1].
    - `top_k`: keep the k most likely tokens; 0 or -1 keeps all.
    - `top_p`: of those, keep the smallest set whose probability reaches p, in (0, 1].

    Ends
    - `max_tokens`: most tokens to generate; None goes on to the end of the context.
    - `stop`: strings that end the text (a string or a list); the text ends before the earliest.
    - `stop_token_ids`: tokens that end the text, besides the model's own end tokens.
    - `include_stop_str_in_output`: keep the stop string in the text.
    - `ignore_eos`: go on past the model's end tokens.

    Reports and text
    - `logprobs`: this many most likely tokens per position and the chosen one, from the raw
      logits; -1 is all. `prompt_logprobs`: the same for the prompt's tokens. A beam search reports
      each output's sum only.
    - `truncate_prompt_tokens`: keep only the last so many tokens of the prompt; -1 keeps what the
      context can hold.
    - `detokenize`: False returns token ids without text.
    - `skip_special_tokens`: leave special tokens out of the text.
    - `spaces_between_special_tokens`: False removes the space that some tokenizers put between
      two special tokens.
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    seed: int | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    bad_words: str | list[str] | tuple[str, ...] = ()
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = _NotGivenFloat(1.0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    temperature: float = _NotGivenFloat(1.0)
    top_k: int = _NotGivenInt(0)
    top_p: float = _NotGivenFloat(1.0)
    min_p: float = _NotGivenFloat(0.0)
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] = ()
    stop_token_ids: list[int] | tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._normalize()
        self._check_ranges()
        self._check_outputs()
        if self.beam_width is not None:
            self._check_beams()
        elif self.length_penalty != 1.0 or self.early_stopping is not False:
            field = "length_penalty" if self.length_penalty != 1.0 else "early_stopping"
            raise InvalidRequestError("belongs to beam search; set beam_width", field=field)
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "needs the text that detokenize=False leaves out", field="stop"
            )

    def _normalize(self) -> None:
        """Turn lists and maps into tuples, checked, so that equal parameters are equal."""
        normalized = {
            "stop": strings("stop", self.stop, most=MAX_STOPS, longest=MAX_STOP_LENGTH),
            "bad_words": strings(
                "bad_words", self.bad_words, most=MAX_BAD_WORDS, longest=MAX_BAD_WORD_LENGTH
            ),
            "stop_token_ids": token_ids("stop_token_ids", self.stop_token_ids, most=MAX_STOPS),
            "allowed_token_ids": self._allowed(),
            "logit_bias": token_biases(
                "logit_bias", self.logit_bias, most=MAX_BIASES, bound=MAX_BIAS
            ),
        }
        for name, value in normalized.items():
            object.__setattr__(self, name, value)
        form = self.structured_outputs
        if form is not None and not isinstance(form, StructuredOutputs):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_wire(form))

    def _allowed(self) -> tuple[int, ...] | None:
        """Return the only tokens there are to choose from, None for all.

        An empty list leaves nothing to choose and is refused; the other lists forbid or end
        something, so that theirs, being empty, ask for nothing.
        """
        if self.allowed_token_ids is None:
            return None
        allowed = token_ids("allowed_token_ids", self.allowed_token_ids, most=MAX_ALLOWED)
        if not allowed:
            raise InvalidRequestError("is empty", field="allowed_token_ids", limit=1)
        return allowed

    def _check_ranges(self) -> None:
        check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_number("temperature", self.temperature, 0.0, math.inf)
        check_integer("top_k", self.top_k, -1, 2**31 - 1)
        check_number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_optional_integer("seed", self.seed, 0, MAX_SEED)
        check_optional_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS_LIMIT)
        check_integer("min_tokens", self.min_tokens, 0, MAX_TOKENS_LIMIT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"{self.min_tokens} is more than max_tokens ({self.max_tokens})",
                field="min_tokens",
                limit=self.max_tokens,
            )
        check_optional_integer("logprobs", self.logprobs, -1, MAX_LOGPROBS)
        check_optional_integer("prompt_logprobs", self.prompt_logprobs, -1, MAX_LOGPROBS)
        check_optional_integer(
            "truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS_LIMIT
        )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "must be -1 or at least 1, not 0", field="truncate_prompt_tokens", limit=1
            )
        for name in _BOOLEANS:
            check_boolean(name, getattr(self, name))

    def _check_outputs(self) -> None:
        check_integer("n", self.n, 1, MAX_OUTPUTS)
        check_optional_integer("best_of", self.best_of, 1, MAX_OUTPUTS)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(
                f"{self.best_of} is less than n ({self.n})", field="best_of", limit=self.n
            )
        if self.beam_width is None and self.is_greedy and self.num_candidates > 1:
            field = "n" if self.n > 1 else "best_of"
            raise InvalidRequestError(
                "greedy sampling has one output only; raise the temperature or set beam_width",
                field=field,
                limit=1,
            )

    def _check_beams(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_OUTPUTS)
        check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError("must be true, false or 'never'", field="early_stopping")
        assert self.beam_width is not None
        if self.n > self.beam_width:
            raise InvalidRequestError(
                f"{self.n} is more than beam_width ({self.beam_width})",
                field="n",
                limit=self.beam_width,
            )
        for name in ("structured_outputs", "logprobs"):
            if getattr(self, name) is not None:
                raise InvalidRequestError("does not go with beam search", field=name)
        unsuited = {"best_of": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        if self.temperature != 1.0 and not self.is_greedy:
            unsuited["temperature"] = 1.0
        for name, neutral in unsuited.items():
            value = getattr(self, name)
            if value != neutral and not (name == "top_k" and value == -1):
                raise InvalidRequestError(
                    "does not go with beam search, which does not sample", field=name
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def num_candidates(self) -> int:
        """Outputs to generate, of which `n` are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def publishes_at_end(self) -> bool:
        """Whether outputs are known only at the end: the best ones are chosen then."""
        return self.beam_width is not None or self.num_candidates > self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias`, always as pairs in the order of the token ids."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def is_given(self, name: str) -> bool:
        """Whether the parameter `name`, one of `MODEL_DEFAULTS`, was set, be it to its default."""
        return not isinstance(getattr(self, name), (_NotGivenFloat, _NotGivenInt))

    def to_wire(self) -> dict[str, Any]:
        """The parameters that differ from their defaults, or that a model might set, by name."""
        wire: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default or (f.name in MODEL_DEFAULTS and self.is_given(f.name)):
                wire[f.name] = _plain(value)
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


_BOOLEANS: Final = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _plain(value: object) -> object:
    if isinstance(value, StructuredOutputs):
        return value.to_wire()
    return list(value) if isinstance(value, tuple) else value
