"""The messages of the protocol: a job on its way in, its events on their way out.

Payloads are msgpack maps with the short keys below. Unknown keys are ignored, so that fields can
be added; an unknown major version is refused. Every size is checked while decoding.

Job:    v version, id, the prompt (see `prompts`), k task, s sampling parameters by name, n model
        name, md metadata, cs cache salt, rp whether the prompt's token ids are wanted, t submission
        time (ms), tp and ts traceparent and tracestate
Event:  i output index, o offset of the first token within that output, t token ids, x text,
        e end of each token's share of x (only when there are several tokens), l logprobs
        [[logprob, [[token id, logprob], …]], …], pl those of the prompt's tokens (null for the
        first), pt the prompt's token ids, tx [[token id, its bytes], …], f finish reason and r stop
        reason of this output, c its summed log-probability, end (the terminal event only): f finish
        reason, p, h and c the prompt, cached and completion tokens, q, pf and d the ms queued, in
        prefill and in decode, a attempts, er [code, message, field, limit]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

from inferq.protocol.errors import (
    DecodeError,
    ErrorInfo,
    InvalidRequestError,
    ProtocolVersionError,
)
from inferq.protocol.keys import partition_of
from inferq.protocol.param_checks import MAX_TOKEN_ID, check_boolean, check_utf8
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import (
    MAX_CHAT_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PROMPT_BYTES,
    MAX_PROMPT_TOKENS,
    ChatMessage,
    ChatPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_name,
    decode_prompt,
    encode_prompt,
)
from inferq.protocol.trace_context import TraceContext, trace_from_wire, trace_to_wire
from inferq.protocol.wire import pack, pairs, typed, unpack

__all__ = [
    "MAX_CHAT_MESSAGES",
    "MAX_EVENT_BYTES",
    "MAX_JOB_BYTES",
    "MAX_METADATA_BYTES",
    "MAX_METADATA_ITEMS",
    "MAX_NAME_BYTES",
    "MAX_PROMPT_BYTES",
    "MAX_PROMPT_TOKENS",
    "MAX_SALT_BYTES",
    "MAX_TOKEN_ID",
    "PROTOCOL_VERSION",
    "ChatMessage",
    "ChatPrompt",
    "Event",
    "FinishReason",
    "Job",
    "Prompt",
    "Task",
    "Terminal",
    "TextPrompt",
    "Timings",
    "TokenLogprob",
    "TokenPrompt",
    "Usage",
    "check_cache_salt",
]

PROTOCOL_VERSION: Final = 1
MAX_METADATA_ITEMS: Final = 32
#: Most bytes of one metadata key or value.
MAX_METADATA_BYTES: Final = 1024
#: Most bytes of a cache salt.
MAX_SALT_BYTES: Final = 256
#: Most bytes of an encoded job; above what its parts may add up to.
MAX_JOB_BYTES: Final = 8 * 2**20
#: Most bytes of an encoded event.
MAX_EVENT_BYTES: Final = 8 * 2**20


class Task(StrEnum):
    """What a job asks for."""

    #: Tokens that follow the prompt.
    GENERATE = "generate"
    #: The prompt's own tokens; no engine is needed.
    TOKENIZE = "tokenize"


@dataclass(frozen=True, slots=True)
class Job:
    """One request for tokens, as it waits in a lane. `created_ms` is the producer's clock.

    Jobs with different `cache_salt` never share cached KV blocks; it does not change the answer.
    With `return_prompt_token_ids` the first event of output 0 has the prompt's token ids. `trace`
    is the span that the job was submitted in.
    """

    id: str
    prompt: Prompt
    params: SamplingParams
    model: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_ms: int = 0
    cache_salt: str | None = None
    task: Task = Task.GENERATE
    return_prompt_token_ids: bool = False
    trace: TraceContext | None = None

    def __post_init__(self) -> None:
        partition_of(self.id)
        check_cache_salt(self.cache_salt)
        if self.model is not None:
            check_name("model", self.model)
        check_boolean("return_prompt_token_ids", self.return_prompt_token_ids)
        _check_metadata(self.metadata)

    def encode(self) -> bytes:
        """Return the job as msgpack."""
        wire: dict[str, Any] = {"v": PROTOCOL_VERSION, "id": self.id, **encode_prompt(self.prompt)}
        if self.task is not Task.GENERATE:
            wire["k"] = self.task.value
        if params := self.params.to_wire():
            wire["s"] = params
        if self.model is not None:
            wire["n"] = self.model
        if self.metadata:
            wire["md"] = dict(self.metadata)
        if self.cache_salt is not None:
            wire["cs"] = self.cache_salt
        if self.return_prompt_token_ids:
            wire["rp"] = True
        wire["t"] = self.created_ms
        return pack({**wire, **trace_to_wire(self.trace)})

    @classmethod
    def decode(cls, payload: bytes) -> Job:
        """Rebuild a job.

        Raises `DecodeError` for bytes that are no job, `ProtocolVersionError` for an unknown major
        version, and `InvalidRequestError` for a job that asks for what is not allowed.
        """
        wire = unpack(payload, MAX_JOB_BYTES)
        if wire.get("v") != PROTOCOL_VERSION:
            raise ProtocolVersionError(wire.get("v"), PROTOCOL_VERSION)
        try:
            return cls(
                id=typed(wire, "id", str),
                prompt=decode_prompt(wire),
                params=SamplingParams.from_wire(typed(wire, "s", dict, {})),
                model=wire.get("n"),
                metadata=typed(wire, "md", dict, {}),
                created_ms=typed(wire, "t", int, 0),
                cache_salt=wire.get("cs"),
                task=_decode_task(wire),
                return_prompt_token_ids=typed(wire, "rp", bool, False),
                trace=trace_from_wire(wire),
            )
        except (TypeError, LookupError) as error:
            raise DecodeError(f"not a job: {error}", payload) from None


class FinishReason(StrEnum):
    """How a job ended, or one of its outputs."""

    #: An end token, a stop token or a stop string.
    STOP = "stop"
    #: max_tokens, or the end of the context.
    LENGTH = "length"
    CANCELLED = "cancelled"
    #: The deadline passed.
    EXPIRED = "expired"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and of the most likely ones at its position.

    Natural logarithms of the raw distribution. `top` is most likely first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts: of the prompt, of its part found in the prefix cache, of the completion.

    The completion is all outputs returned; candidates of `best_of` that were not do not count.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds a job spent queued, in prefill (to its first token) and in decode."""

    queued_ms: int = 0
    prefill_ms: int = 0
    decode_ms: int = 0


@dataclass(frozen=True, slots=True)
class Terminal:
    """The end of a job: part of its last event, and of no other. `error` goes with reason error."""

    finish_reason: FinishReason
    usage: Usage = Usage()
    timings: Timings = Timings()
    attempts: int = 0
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """What one publish appended to one output of a job: tokens, text, perhaps the end.

    `offset` counts tokens within output `index`. `text_ends[k]` is the end, in characters of
    `text`, of what the first k + 1 tokens contributed; text after the last of them was held back
    and is released at the end. `finish_reason` and `stop_reason` (the stop string or token id) end
    the output, with its `cumulative_logprob` where that is known; `terminal` ends the job.
    `prompt_logprobs` and `prompt_token_ids` come with output 0's first token, with one entry for
    each prompt token. `token_texts` has the bytes of every token that is named in the event, where
    log-probabilities were asked for.
    """

    index: int = 0
    offset: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    text_ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    terminal: Terminal | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    token_texts: Mapping[int, bytes] = field(default_factory=dict)
    prompt_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.text_ends) != len(self.token_ids):
            raise ValueError("an event has one text end for each token")

    def after(self, count: int) -> Event:
        """Return this event without its first `count` tokens and their text."""
        if count <= 0:
            return self
        cut = self.text_ends[count - 1] if count <= len(self.text_ends) else len(self.text)
        return replace(
            self,
            offset=self.offset + count,
            token_ids=self.token_ids[count:],
            text=self.text[cut:],
            text_ends=tuple(end - cut for end in self.text_ends[count:]),
            logprobs=None if self.logprobs is None else self.logprobs[count:],
            prompt_logprobs=None,
            prompt_token_ids=None,
        )

    def encode(self) -> bytes:
        """Return the event as msgpack."""
        wire: dict[str, Any] = {"i": self.index, "o": self.offset}
        if self.token_ids:
            wire["t"] = self.token_ids
        if self.text:
            wire["x"] = self.text
        if len(self.token_ids) > 1 or (self.text_ends and self.text_ends[-1] != len(self.text)):
            wire["e"] = self.text_ends
        if self.logprobs is not None:
            wire["l"] = [_encode_logprob(lp) for lp in self.logprobs]
        if self.prompt_logprobs is not None:
            wire["pl"] = [lp and _encode_logprob(lp) for lp in self.prompt_logprobs]
        if self.prompt_token_ids is not None:
            wire["pt"] = self.prompt_token_ids
        if self.token_texts:
            wire["tx"] = list(self.token_texts.items())
        if self.finish_reason is not None:
            wire["f"] = self.finish_reason.value
        if self.stop_reason is not None:
            wire["r"] = self.stop_reason
        if self.cumulative_logprob is not None:
            wire["c"] = self.cumulative_logprob
        if self.terminal is not None:
            wire["end"] = _encode_terminal(self.terminal)
        return pack(wire)

    @classmethod
    def decode(cls, payload: bytes) -> Event:
        """Rebuild an event; raise `DecodeError` for bytes that are none."""
        wire = unpack(payload, MAX_EVENT_BYTES)
        try:
            token_ids = tuple(typed(wire, "t", list, []))
            text = typed(wire, "x", str, "")
            ends = tuple(wire["e"]) if "e" in wire else (len(text),) * min(len(token_ids), 1)
            finish = wire.get("f")
            total = wire.get("c")
            event = cls(
                index=typed(wire, "i", int, 0),
                offset=typed(wire, "o", int, 0),
                token_ids=token_ids,
                text=text,
                text_ends=ends,
                logprobs=_decode_logprobs(wire.get("l")),
                finish_reason=None if finish is None else FinishReason(finish),
                stop_reason=wire.get("r"),
                terminal=_decode_terminal(wire["end"]) if "end" in wire else None,
                cumulative_logprob=None if total is None else float(total),
                prompt_logprobs=_decode_prompt_logprobs(wire.get("pl")),
                token_texts=_decode_token_texts(wire.get("tx", [])),
                prompt_token_ids=tuple(typed(wire, "pt", list)) if "pt" in wire else None,
            )
            _check_event(event)
        except (TypeError, LookupError, ValueError) as error:
            raise DecodeError(f"not an event: {error}", payload) from None
        return event


def check_cache_salt(salt: str | None) -> None:
    """Raise `InvalidRequestError` unless the salt is absent, or text of 1 to 256 bytes."""
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise InvalidRequestError("must be text that is not empty", field="cache_salt")
    if len(check_utf8("cache_salt", salt)) > MAX_SALT_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_SALT_BYTES} bytes", field="cache_salt", limit=MAX_SALT_BYTES
        )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > MAX_METADATA_ITEMS:
        raise InvalidRequestError(
            f"{len(metadata)} items are more than {MAX_METADATA_ITEMS}",
            field="metadata",
            limit=MAX_METADATA_ITEMS,
        )
    for pair in metadata.items():
        for part in pair:
            if not isinstance(part, str):
                raise InvalidRequestError("keys and values must be text", field="metadata")
            if len(check_utf8("metadata", part)) > MAX_METADATA_BYTES:
                raise InvalidRequestError(
                    f"a key or value is longer than {MAX_METADATA_BYTES} bytes",
                    field="metadata",
                    limit=MAX_METADATA_BYTES,
                )


def _check_event(event: Event) -> None:
    if event.index < 0 or event.offset < 0:
        raise ValueError("negative index or offset")
    numbers = (*event.token_ids, *event.text_ends, *event.token_texts)
    if not all(type(i) is int and i >= 0 for i in (*numbers, *(event.prompt_token_ids or ()))):
        raise ValueError("token ids and text ends must be whole numbers")
    ends = (0, *event.text_ends, len(event.text))
    if any(a > b for a, b in pairwise(ends)):
        raise ValueError("text ends must grow and stay within the text")
    if event.stop_reason is not None and not isinstance(event.stop_reason, (str, int)):
        raise ValueError("a stop reason is a string or a token id")
    if event.logprobs is not None and len(event.logprobs) != len(event.token_ids):
        raise ValueError("logprobs are of every token of an event, or of none")


def _decode_task(wire: Mapping[str, Any]) -> Task:
    name = typed(wire, "k", str, Task.GENERATE.value)
    try:
        return Task(name)
    except ValueError:
        raise InvalidRequestError(
            f"{name[:32]!r} is not a task that this version knows", field="task"
        ) from None


def _encode_logprob(entry: TokenLogprob) -> list[Any]:
    return [entry.logprob, entry.top]


def _decode_logprobs(wire: Any) -> tuple[TokenLogprob, ...] | None:
    return None if wire is None else tuple(_decode_logprob(entry) for entry in wire)


def _decode_prompt_logprobs(wire: Any) -> tuple[TokenLogprob | None, ...] | None:
    if wire is None:
        return None
    return tuple(None if entry is None else _decode_logprob(entry) for entry in wire)


def _decode_token_texts(wire: Any) -> dict[int, bytes]:
    texts = dict(pairs(wire))
    if not all(isinstance(text, bytes) for text in texts.values()):
        raise TypeError("the text of a token must be bytes")
    return texts


def _decode_logprob(wire: Any) -> TokenLogprob:
    logprob, top = wire
    return TokenLogprob(float(logprob), tuple((int(i), float(p)) for i, p in pairs(top)))


def _encode_terminal(end: Terminal) -> dict[str, Any]:
    wire: dict[str, Any] = {
        "f": end.finish_reason.value,
        "p": end.usage.prompt_tokens,
        "h": end.usage.cached_tokens,
        "c": end.usage.completion_tokens,
        "q": end.timings.queued_ms,
        "pf": end.timings.prefill_ms,
        "d": end.timings.decode_ms,
        "a": end.attempts,
    }
    if (error := end.error) is not None:
        wire["er"] = [error.code, error.message, error.field, error.limit]
    return wire


def _decode_terminal(wire: Any) -> Terminal:
    if not isinstance(wire, dict):
        raise TypeError("end must be a map")

    def count(key: str) -> int:
        return int(typed(wire, key, int, 0))

    return Terminal(
        finish_reason=FinishReason(wire["f"]),
        usage=Usage(count("p"), count("h"), count("c")),
        timings=Timings(count("q"), count("pf"), count("d")),
        attempts=count("a"),
        error=_decode_error(wire["er"]) if "er" in wire else None,
    )


def _decode_error(wire: Any) -> ErrorInfo:
    code, message, name, limit = wire
    if not isinstance(code, str) or not isinstance(message, str):
        raise TypeError("an error has a code and a message")
    return ErrorInfo(
        code,
        message,
        name if isinstance(name, str) else None,
        limit if isinstance(limit, str) else None,
    )
