"""What a producer's arguments become: a checked job, its cost bound and its place in the queue."""

from __future__ import annotations

import dataclasses
import math
import operator
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, SupportsIndex, TypedDict, Unpack

from inferq.protocol.digest import content_digest
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.json_values import encoded_size
from inferq.protocol.keys import Lane, new_job_id
from inferq.protocol.messages import (
    ChatMessage,
    ChatPrompt,
    Job,
    Prompt,
    Task,
    TextPrompt,
    TokenPrompt,
)
from inferq.protocol.param_checks import check_utf8
from inferq.protocol.params import SamplingParams
from inferq.protocol.prompts import MESSAGE_FIELDS
from inferq.protocol.scripts import MAX_KEY_BYTES, MAX_NOTE_BYTES, MAX_RETENTION_MS

#: One message of a chat: a map with `role`, `content` and perhaps `name`, `tool_call_id`,
#: `tool_calls` or `reasoning_content`; or the message itself.
ChatInput = Mapping[str, Any] | ChatMessage
#: What `submit` takes: text, token ids, or the messages of a chat.
PromptInput = str | Sequence[int] | Sequence[ChatInput]


class PromptOptions(TypedDict, total=False):
    """How token ids are made of a prompt; all but the first are for chat messages.

    - `add_special_tokens`: whether a text gets the model's special tokens around it.
    - `tools`: functions that the model may call, as OpenAI's objects.
    - `chat_template_kwargs`: more names for the model's chat template.
    - `add_generation_prompt`: whether the template begins the assistant's answer; true by default.
    - `continue_final_message`: leave the last message open, so that the output goes on with it.
    """

    add_special_tokens: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


#: Longest deadline or delay, in seconds (30 days).
MAX_DELAY_S: Final = 30 * 24 * 3600.0
#: Tokens that a tokenizer may add to a text (begin and end marks).
TEXT_MARGIN: Final = 8
#: Tokens that a chat template adds per message (marks of its role, its begin and its end), and
#: once (a default system prompt, some 30 tokens in common ones, and the start of the answer).
#: A bound for choosing a worker only: the worker counts the tokens themselves.
MESSAGE_MARGIN: Final = 16
TEMPLATE_MARGIN: Final = 112


def make_job(
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    model: str | None = None,
    metadata: Mapping[str, str] | None = None,
    cache_salt: str | None = None,
    partition: int = 0,
    task: Task = Task.GENERATE,
    return_prompt_token_ids: bool = False,
) -> tuple[Job, str]:
    """Return a job with an id of its own, and a seed if `params` has none; and its digest.

    The digest is of what was asked for: not of the id, the time, the cache salt, or a seed that was
    drawn.
    """
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise InvalidRequestError(
            f"must be SamplingParams, not {type(params).__name__}", field="params"
        )
    if not isinstance(metadata, Mapping | None):
        raise InvalidRequestError("must be a map of text to text", field="metadata")
    job = Job(
        id=new_job_id(partition),
        prompt=prompt,
        params=params,
        model=model,
        metadata={} if metadata is None else metadata,
        created_ms=time.time_ns() // 1_000_000,
        cache_salt=cache_salt,
        task=task,
        return_prompt_token_ids=return_prompt_token_ids,
    )
    digest = content_digest(
        job.prompt,
        params,
        job.model,
        job.metadata,
        task=task,
        return_prompt_token_ids=return_prompt_token_ids,
    )
    if params.seed is None and task is Task.GENERATE:
        seeded = dataclasses.replace(params, seed=secrets.randbits(63))
        job = dataclasses.replace(job, params=seeded)
    return job, digest


def to_prompt(
    prompt: PromptInput | None,
    messages: Sequence[ChatInput] | None,
    **options: Unpack[PromptOptions],
) -> Prompt:
    """Return the prompt's message for text, token ids or chat messages, whichever is given."""
    unknown = sorted(set(options) - PromptOptions.__optional_keys__)
    if unknown:
        raise TypeError(f"there is no argument {unknown[0]!r}")
    if messages is not None:
        if prompt is not None:
            raise InvalidRequestError("goes not together with messages", field="prompt")
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidRequestError("must be a list of messages", field="messages")
        return _chat_prompt(messages, options)
    if prompt is None:
        raise InvalidRequestError("is missing: give text, token ids or messages", field="prompt")
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        raise InvalidRequestError("must be text, not bytes: decode it first", field="prompt")
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"must be text, token ids or chat messages, not {type(prompt).__name__}",
            field="prompt",
        )
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], (Mapping, ChatMessage)):
        return _chat_prompt(prompt, options)
    _refuse_options(options, _CHAT_OPTIONS, "chat messages")
    if isinstance(prompt, str):
        return TextPrompt(prompt, options.get("add_special_tokens", True))
    _refuse_options(options, ("add_special_tokens",), "a text")
    return TokenPrompt(tuple(_token_id(item) for item in prompt))


_CHAT_OPTIONS: Final = (
    "tools",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
#: What options are when they ask for nothing; `tools` and the like may be empty too.
_NEUTRAL: Final[Mapping[str, object]] = MappingProxyType(
    {"add_special_tokens": True, "add_generation_prompt": True, "continue_final_message": False}
)


def _chat_prompt(messages: Sequence[Any], options: PromptOptions) -> ChatPrompt:
    _refuse_options(options, ("add_special_tokens",), "a text")
    tools, names = options.get("tools") or (), options.get("chat_template_kwargs") or {}
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidRequestError("must be a list of tools", field="tools")
    return ChatPrompt(
        tuple(_chat_message(message) for message in messages),
        tools=tuple(tools),
        template_kwargs=names,
        add_generation_prompt=options.get("add_generation_prompt", True),
        continue_final_message=options.get("continue_final_message", False),
    )


def _refuse_options(options: PromptOptions, names: Sequence[str], only_for: str) -> None:
    given: Mapping[str, object] = {**options}
    for name in names:
        if given.get(name) and name not in _NEUTRAL:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)
        if name in _NEUTRAL and given.get(name, _NEUTRAL[name]) != _NEUTRAL[name]:
            raise InvalidRequestError(f"goes with {only_for} only", field=name)


def _token_id(item: object) -> Any:
    """Return a plain int for other whole numbers (numpy's); TokenPrompt checks every id."""
    if type(item) is int or isinstance(item, bool) or not isinstance(item, SupportsIndex):
        return item
    return operator.index(item)


def cost_bounds(job: Job) -> tuple[int, int | None]:
    """Return how many tokens the job's prompt, and all its candidates, can be at most.

    The prompt's is exact for token ids; the candidates' is None without `max_tokens`. A job that is
    not for the engine takes no room in it.
    """
    if job.task is not Task.GENERATE:
        return 0, 0
    params = job.params
    prompt_tokens = prompt_token_bound(job.prompt)
    if params.truncate_prompt_tokens is not None and params.truncate_prompt_tokens > 0:
        prompt_tokens = min(prompt_tokens, params.truncate_prompt_tokens)
    budget = None if params.max_tokens is None else params.max_tokens * params.num_candidates
    return prompt_tokens, budget


def prompt_token_bound(prompt: Prompt) -> int:
    """Return how many tokens `prompt` can be at most: exact for token ids.

    A byte-level tokenizer never makes more tokens than there are bytes.
    """
    match prompt:
        case TokenPrompt(token_ids):
            return len(token_ids)
        case TextPrompt(text):
            return len(text.encode()) + TEXT_MARGIN
        case ChatPrompt(messages):
            size = sum(len(m.role.encode()) + m.num_bytes for m in messages)
            size += sum(map(encoded_size, prompt.tools))
            return size + MESSAGE_MARGIN * len(messages) + TEMPLATE_MARGIN


def to_lane(lane: str) -> Lane:
    """Return the lane of that name."""
    try:
        return Lane(lane)
    except ValueError:
        names = ", ".join(repr(known.value) for known in Lane)
        raise InvalidRequestError(
            f"{lane!r} is not one of {names}", field="lane", limit=names
        ) from None


def to_schedule(
    deadline_s: float | None, not_before: datetime | None, delay_s: float | None
) -> tuple[int | None, int]:
    """Return deadline and delay in milliseconds from now, the one after the other."""
    delay_ms = to_delay_ms(not_before, delay_s)
    if deadline_s is None:
        return None, delay_ms
    deadline_ms = max(1, _milliseconds("deadline_s", deadline_s, may_be_zero=False))
    if deadline_ms <= delay_ms:
        raise InvalidRequestError(
            f"{deadline_s:g} s from now is before the job may start",
            field="deadline_s",
            limit=delay_ms / 1000,
        )
    return deadline_ms, delay_ms


def to_delay_ms(not_before: datetime | None, delay_s: float | None) -> int:
    """Return how many milliseconds from now (by this machine's clock) the job may start."""
    if not_before is None:
        return 0 if delay_s is None else _milliseconds("delay_s", delay_s, may_be_zero=True)
    if delay_s is not None:
        raise InvalidRequestError("goes not together with delay_s", field="not_before")
    if not isinstance(not_before, datetime) or not_before.utcoffset() is None:
        raise InvalidRequestError("must be a datetime with a time zone", field="not_before")
    delay_s = max(0.0, (not_before - datetime.now(UTC)).total_seconds())
    return _milliseconds("not_before", delay_s, may_be_zero=True)


def check_idempotency_key(key: str | None) -> None:
    """Raise `InvalidRequestError` unless the key is absent or text of 1 to 256 bytes."""
    if key is None:
        return
    if not isinstance(key, str) or not key:
        raise InvalidRequestError("must be text that is not empty", field="idempotency_key")
    if len(check_utf8("idempotency_key", key)) > MAX_KEY_BYTES:
        raise InvalidRequestError(
            f"is longer than {MAX_KEY_BYTES} bytes",
            field="idempotency_key",
            limit=MAX_KEY_BYTES,
        )


def check_note(note: bytes | None) -> None:
    """Raise `InvalidRequestError` unless the note is absent, or 1 to 4,096 bytes."""
    if note is None:
        return
    if not isinstance(note, bytes) or not note:
        raise InvalidRequestError("must be bytes, at least one", field="note", limit=1)
    if len(note) > MAX_NOTE_BYTES:
        raise InvalidRequestError(
            f"{len(note)} bytes are more than {MAX_NOTE_BYTES}", field="note", limit=MAX_NOTE_BYTES
        )


def check_seconds(field: str, value: object) -> float:
    """Return a time-out in seconds, which must be a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError(f"must be a number of seconds, not {value!r}", field=field)
    if value <= 0:
        raise InvalidRequestError(f"{value} is not above 0", field=field, limit=0)
    return float(value)


def to_retention_ms(retention_s: float) -> int:
    """Return a retention in milliseconds: at least one, and no longer than the scripts allow."""
    longest_s = MAX_RETENTION_MS / 1000
    if not 0.001 <= check_seconds("retention_s", retention_s) <= longest_s:
        raise InvalidRequestError(
            f"{retention_s:g} s is not in [0.001, {longest_s:.0f}] s",
            field="retention_s",
            limit=f"[0.001, {longest_s:.0f}]",
        )
    return int(retention_s * 1000)


def _milliseconds(field: str, seconds: float, *, may_be_zero: bool) -> int:
    if not (may_be_zero and seconds == 0 and not isinstance(seconds, bool)):
        check_seconds(field, seconds)
    if seconds > MAX_DELAY_S:
        raise InvalidRequestError(
            f"{seconds:g} s are more than {MAX_DELAY_S:g}", field=field, limit=MAX_DELAY_S
        )
    return int(seconds * 1000)


def _chat_message(message: Any) -> ChatMessage:
    if isinstance(message, ChatMessage):
        return message
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"every message must be a map with role and content, not {type(message).__name__}",
            field="messages",
        )
    known = ("role", "content", *MESSAGE_FIELDS)
    unknown = sorted(str(key) for key in message if key not in known)
    if unknown:
        raise InvalidRequestError(
            f"is not supported: a message has {', '.join(known)}", field=f"messages.{unknown[0]}"
        )
    extra = {name: message[name] for name in MESSAGE_FIELDS if message.get(name) is not None}
    for name in ("role", "content"):
        if name not in message and not (name == "content" and "tool_calls" in extra):
            raise InvalidRequestError("is missing", field=f"messages.{name}")
    return ChatMessage(message["role"], message.get("content"), extra)
