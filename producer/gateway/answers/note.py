"""What a replica must know of a job to write its response: kept with the job, as its note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final, Self

import orjson

#: Most jobs of one request whose ids fit into the note of its first.
MAX_LISTED_JOBS: Final = 64


class Kind(StrEnum):
    """Which shape the response has."""

    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The parts of a request that shape its response; never its prompt or its parameters.

    - `n`: choices of each prompt; this job's prompt is at `position` of `prompts`. The first job
      of several lists the others' ids in `jobs`, if they are at most `MAX_LISTED_JOBS`.
    - `key`: id of the API key that the request came with.
    - `budget`: most tokens of all outputs together, where that is known.
    - `logprobs`: alternatives shown of each token; None without log-probabilities.
    - `echo`: the choices begin with the prompt; `echo_text` is that, unless it is too long.
    - `prompt_only`: the token that is generated is to be dropped.
    - `form_field`: the body's name of the form that the answer must have.
    - `tools`: how tool calls are found in the text, in the form of the tools' plan.
    """

    kind: Kind
    model: str
    n: int = 1
    position: int = 0
    prompts: int = 1
    jobs: tuple[str, ...] = ()
    key: str | None = None
    budget: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    echo: bool = False
    echo_text: str | None = None
    prompt_only: bool = False
    form_field: str | None = None
    tools: Mapping[str, Any] | None = None

    def encode(self) -> bytes:
        """Return the note as JSON, without what has its default."""
        given = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        return orjson.dumps({"v": _VERSION, **given})

    @classmethod
    def decode(cls, payload: bytes | None) -> Self | None:
        """Rebuild a note; None for what is none of ours."""
        try:
            wire = orjson.loads(payload or b"null")
            if not isinstance(wire, dict) or wire.pop("v", None) != _VERSION:
                return None
            wire["kind"] = Kind(wire["kind"])
            wire["jobs"] = tuple(wire.get("jobs", ()))
            return cls(**wire)
        except (ValueError, TypeError, LookupError):
            return None


_VERSION: Final = 1
