"""Chunks of a stream, as JSON: what does not change from one to the next is encoded once."""

from __future__ import annotations

from typing import Any, Final

import orjson

from inferq.producer.gateway.answers.choices import Delta
from inferq.producer.gateway.answers.note import Kind, Note
from inferq.protocol.messages import Usage

_OBJECTS: Final = {Kind.COMPLETION: "text_completion", Kind.CHAT: "chat.completion.chunk"}
_ID_PREFIXES: Final = {Kind.COMPLETION: "cmpl-", Kind.CHAT: "chatcmpl-"}


def response_id(kind: Kind, job_id: str) -> str:
    """Return the id of the response whose first job this is."""
    return _ID_PREFIXES[kind] + job_id


def job_id_of(response: str) -> str:
    """Return the job's id in the id of a response, or in itself."""
    for prefix in _ID_PREFIXES.values():
        response = response.removeprefix(prefix)
    return response


def created_s(job_id: str) -> int:
    """Return when a job was made, in seconds since 1970: its id begins with the milliseconds."""
    return int(job_id[:12], 16) // 1000


def usage_body(usage: Usage) -> dict[str, Any]:
    """Return the usage in OpenAI's shape."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChunkEncoder:
    """Encodes the chunks of one response, whose first job and its note are given."""

    def __init__(self, note: Note, job_id: str) -> None:
        self._is_chat = note.kind is Kind.CHAT
        self._head = {
            "id": response_id(note.kind, job_id),
            "object": _OBJECTS[note.kind],
            "created": created_s(job_id),
            "model": note.model,
        }
        # OpenAI's chunks have a null usage where a chunk of its own is going to have it
        self._has_usage = note.include_usage or note.continuous_usage
        end = b',"usage":null}' if self._has_usage else b"}"
        if self._is_chat:
            self._text_end = b'},"logprobs":null,"finish_reason":null}]' + end
        else:
            self._text_end = b',"logprobs":null,"finish_reason":null}]' + end
        self._text_begins: dict[int, bytes] = {}

    def opening(self, delta: Delta) -> bytes:
        """Return the chunk that a choice begins with."""
        if not self._is_chat:
            return self._general(delta, {"text": delta.text})
        return self._general(delta, {"delta": {"role": "assistant", "content": ""}})

    def content(self, delta: Delta) -> bytes:
        """Return the chunk of what is new in a choice, apart from its end."""
        if delta.is_text_only:
            return self._text_begin(delta.index) + orjson.dumps(delta.text) + self._text_end
        if not self._is_chat:
            return self._general(delta, {"text": delta.text})
        message: dict[str, Any] = {}
        if delta.text or not delta.tool_calls:
            message["content"] = delta.text
        if delta.tool_calls:
            message["tool_calls"] = [call.to_json() for call in delta.tool_calls]
        return self._general(delta, {"delta": message})

    def end(self, delta: Delta) -> bytes:
        """Return the chunk of a choice's end."""
        choice: dict[str, Any] = {
            "index": delta.index,
            **({"delta": {}} if self._is_chat else {"text": ""}),
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return self._chunk([choice], delta.usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the last chunk, of usage alone."""
        return orjson.dumps({**self._head, "choices": [], "usage": usage_body(usage)})

    def _general(self, delta: Delta, content: dict[str, Any]) -> bytes:
        logprobs = delta.logprobs
        if self._is_chat and logprobs is not None:
            logprobs = {"content": logprobs, "refusal": None}
        choice = {"index": delta.index, **content, "logprobs": logprobs, "finish_reason": None}
        if delta.token_ids:
            choice["token_ids"] = delta.token_ids
        if delta.prompt_token_ids is None:
            return self._chunk([choice], delta.usage)
        if self._is_chat:
            return self._chunk([choice], delta.usage, prompt_token_ids=delta.prompt_token_ids)
        choice["prompt_token_ids"] = delta.prompt_token_ids
        return self._chunk([choice], delta.usage)

    def _chunk(self, choices: list[dict[str, Any]], usage: Usage | None, **more: Any) -> bytes:
        chunk = {**self._head, "choices": choices, **more}
        if self._has_usage:
            chunk["usage"] = None if usage is None else usage_body(usage)
        return orjson.dumps(chunk)

    def _text_begin(self, index: int) -> bytes:
        begin = self._text_begins.get(index)
        if begin is None:
            head = orjson.dumps(self._head)[:-1]
            begin = head + b',"choices":[{"index":%d,' % index
            begin += b'"delta":{"content":' if self._is_chat else b'"text":'
            self._text_begins[index] = begin
        return begin
