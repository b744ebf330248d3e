"""A file of the longest length goes through a gateway's process without being held in it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inferq.producer.batches.surveys import MAX_FILE_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("no_batches")]

CHUNK = b"x" * 2**20
HEAD = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)
#: What handling the file may take beyond what the process takes anyway.
MOST_BYTES = 64 * 2**20


def form(size: int) -> Iterator[bytes]:
    yield HEAD
    for _ in range(size // len(CHUNK)):
        yield CHUNK
    yield b"\r\n--cut--\r\n"


def peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_the_longest_file_is_uploaded_and_downloaded_within_little_memory(
    valkey_url: str, queue: str, tmp_path: Path
) -> None:
    storage, spool = tmp_path / "storage", tmp_path / "tmp"
    spool.mkdir()
    flags = ["--port", "0", "--redis-url", valkey_url, "--queues", queue, "--log-format", "json"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "inferq", "gateway", *flags, "--batch-storage", str(storage)],
        stderr=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(spool), "PATH": "/usr/bin:/bin"},
    ) as process:
        try:
            assert process.stderr is not None
            lines = map(json.loads, process.stderr)
            url = next(line["url"] for line in lines if line["event"] == "serving")
            with httpx.Client(base_url=url, timeout=250) as http:
                kind = {"content-type": "multipart/form-data; boundary=cut"}
                small = http.post("/v1/files", content=form(len(CHUNK)), headers=kind)
                assert small.status_code == 200
                base = peak_bytes(process.pid)
                made = http.post("/v1/files", content=form(MAX_FILE_BYTES), headers=kind).json()
                assert made["bytes"] == MAX_FILE_BYTES
                digest = hashlib.sha256()
                with http.stream("GET", f"/v1/files/{made['id']}/content") as answer:
                    for chunk in answer.iter_bytes():
                        digest.update(chunk)
                expected = hashlib.sha256(CHUNK * (MAX_FILE_BYTES // len(CHUNK)))
                assert digest.digest() == expected.digest()
                assert peak_bytes(process.pid) - base < MOST_BYTES
                assert list(spool.iterdir()) == []
                longer = http.post(
                    "/v1/files", content=form(MAX_FILE_BYTES + len(CHUNK)), headers=kind
                )
                assert longer.status_code == 413
        finally:
            process.kill()
