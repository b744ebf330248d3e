"""Many streams through one gateway process: all complete, few connections, bounded memory."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from http_stream import HttpStream

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gateway.py"
#: Of the gateway: four for commands, and one for each 256 streams.
COMMAND_CONNECTIONS = 4
STREAMS_PER_READER = 256
#: A stream with its connection, request, task and buffer; measured: 47.
KIB_PER_STREAM = 120


def run(streams: int, *flags: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--streams", str(streams), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


@pytest.mark.timeout(320)
@pytest.mark.parametrize("streams", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_all_streams_complete_over_few_connections_in_bounded_memory(streams: int) -> None:
    figures = run(streams, "--tokens", "20", "--step-ms", str(2 * streams))
    assert figures["complete"] == streams
    assert figures["tokens"] == 20 * streams
    readers = -(-streams // STREAMS_PER_READER)
    assert figures["redis_connections"] <= COMMAND_CONNECTIONS + readers <= 8
    assert figures["rss_peak_mib"] - figures["rss_before_mib"] < streams * KIB_PER_STREAM / 1024
    assert figures["all_open_s"] > 0
    assert figures["pairs"] > 0
    assert figures["added_p50_ms"] <= figures["added_p99_ms"]


async def read(lines: bytes, tokens: int) -> HttpStream:
    reader = asyncio.StreamReader()
    reader.feed_data(lines)
    reader.feed_eof()
    stream = HttpStream(port=1, tokens=tokens)
    await stream.read_events(reader)
    return stream


async def test_a_stream_counts_as_complete_with_all_its_tokens_its_reason_and_its_end() -> None:
    tokens = b'id: 1\ndata: {"text":" a"}\n\nid: 3\ndata: {"text":" b c"}\n\n'
    reason = b'id: 3-1\ndata: {"finish_reason":"length"}\n\n'
    done = b"data: [DONE]\n\n"
    whole = await read(tokens + reason + done, 3)
    assert whole.is_complete
    assert len(whole.times) == 3
    assert not (await read(tokens + reason + done, 4)).is_complete
    assert not (await read(tokens + reason, 3)).is_complete
    assert not (await read(tokens + done, 3)).is_complete
