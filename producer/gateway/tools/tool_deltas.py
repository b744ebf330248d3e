"""What a parser of tool calls yields: pieces of calls, in OpenAI's shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of the call at `index`: the first has its id and name, all a piece of arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the item of a chunk's `delta.tool_calls`."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {
            "index": self.index,
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


#: Content, or a piece of a tool call.
Part = str | ToolDelta


def call_id(job_id: str, output_index: int, call_index: int) -> str:
    """Return the id of a call: the same wherever the job's stream is read."""
    digest = hashlib.sha256(f"{job_id}/{output_index}/{call_index}".encode())
    return f"call_{digest.hexdigest()[:24]}"


def assemble(parts: Iterable[Part]) -> tuple[str | None, list[dict[str, Any]] | None]:
    """Return a message's `content` and `tool_calls`, each null where there is none.

    Without calls the content is text, be it empty.
    """
    content: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, str):
            content.append(part)
        elif part.name is not None:
            calls[part.index] = {
                "id": part.id,
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
        else:
            calls[part.index]["function"]["arguments"] += part.arguments
    text = "".join(content)
    return (text or None, list(calls.values())) if calls else (text, None)
