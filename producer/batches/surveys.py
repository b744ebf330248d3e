"""The first pass over a whole file: how many lines, which model, which ids come twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from inferq.producer.batches.line_reader import read_lines
from inferq.producer.batches.lines import Envelope, LineRefused, read_envelope
from inferq.producer.batches.records import FileFault, Terms
from inferq.protocol.errors import InferqError

#: Most lines of a file, blank ones aside, and most bytes.
MAX_LINES: Final = 50_000
MAX_FILE_BYTES: Final = 200 * 2**20


class SurveyFailed(InferqError):
    """A file that cannot be a batch."""

    def __init__(self, fault: FileFault) -> None:
        super().__init__(fault.message)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Survey:
    """What is known of a file once all of it was read.

    `model` and `endpoint` are None where no line names one; `repeated` are numbers of lines whose
    `custom_id` an earlier line has.
    """

    total: int
    model: str | None = None
    endpoint: str | None = None
    repeated: frozenset[int] = field(default_factory=frozenset)

    def encode_repeated(self) -> str:
        """Return the repeated lines as JSON."""
        return json.dumps(sorted(self.repeated))


def decode_repeated(payload: bytes) -> frozenset[int]:
    """Rebuild the repeated lines; none where nothing was written."""
    return frozenset(json.loads(payload or b"[]"))


async def survey(chunks: AsyncGenerator[bytes], *, endpoint: str | None, terms: Terms) -> Survey:
    """Read a file's lines once; the first that is well-formed decides what is not given.

    Raises `SurveyFailed`.
    """
    total, model = 0, None
    seen: set[bytes] = set()
    repeated: set[int] = set()
    async with aclosing(read_lines(_bounded(chunks))) as lines:
        async for line in lines:
            total += 1
            if total > MAX_LINES:
                raise _failed(
                    "too_many_lines", f"The file has more than {MAX_LINES} lines.", line.number
                )
            try:
                envelope = read_envelope(line)
            except LineRefused:
                continue
            if _is_repeated(envelope, seen):
                repeated.add(line.number)
            endpoint = endpoint or envelope.url
            model = model or envelope.model or terms.default_model
            await asyncio.sleep(0)  # the lease is renewed meanwhile
    if total == 0:
        raise _failed("empty_file", "The file has no lines.")
    allowed = terms.allowed_models
    if model is not None and allowed is not None and model not in allowed:
        raise _failed("model_not_allowed", f"This API key may not use the model {model!r}.")
    return Survey(total, model, endpoint, frozenset(repeated))


def _is_repeated(envelope: Envelope, seen: set[bytes]) -> bool:
    """Whether the id was seen before, by its digest: ids may be long, and there are many."""
    digest = hashlib.blake2b(envelope.custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        return True
    seen.add(digest)
    return False


async def _bounded(chunks: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    size = 0
    async with aclosing(chunks):
        async for chunk in chunks:
            size += len(chunk)
            if size > MAX_FILE_BYTES:
                raise _failed("file_too_large", f"The file is longer than {MAX_FILE_BYTES} bytes.")
            yield chunk


def _failed(code: str, message: str, line: int | None = None) -> SurveyFailed:
    return SurveyFailed(FileFault(code, message, line))
