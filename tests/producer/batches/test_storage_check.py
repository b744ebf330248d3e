"""What can never keep files is refused at the start; what may yet come is a warning."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from structlog.testing import capture_logs

from inferq.producer.batches import storage as module
from inferq.producer.batches.storage import FileStorage, StorageError
from inferq.producer.gateway.server import GatewayServer
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError

#: Generous: the machine may be busy.
TIMEOUT_S = 90


@pytest.fixture
def no_folder(tmp_path: Path) -> str:
    """A path where no folder can be."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


async def test_what_can_be_used_is_left_as_it_was(any_storage: FileStorage) -> None:
    with capture_logs() as lines:
        await any_storage.check_at_start()
    assert lines == []
    assert await any_storage.listing() == []


@pytest.mark.parametrize("below", ["", "/folder"])
async def test_a_file_is_no_folder(no_folder: str, below: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"{below} cannot be written: Not a dir"
    ) as caught:
        await FileStorage(no_folder + below).check_at_start()
    assert caught.value.field == "batch_storage"


@pytest.mark.parametrize(
    ("code", "is_lasting"),
    [
        (errno.EACCES, True),
        (errno.EROFS, True),
        (errno.ENAMETOOLONG, True),
        (errno.ENOSPC, False),
        (errno.EDQUOT, False),
        (errno.ESTALE, False),
        (errno.EIO, False),
    ],
)
async def test_waiting_mends_some_faults_of_a_volume(
    storage: FileStorage, monkeypatch: pytest.MonkeyPatch, code: int, is_lasting: bool
) -> None:
    def fail(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    expected = InvalidRequestError if is_lasting else StorageError
    with pytest.raises(expected, match=os.strerror(code)):
        await storage.check()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A volume that does not answer while the test lasts, and is not waited for."""
    release = threading.Event()
    monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 0.01)

    def hang(**_: object) -> BinaryIO:
        release.wait()
        return Path(os.devnull).open("wb")

    monkeypatch.setattr(tempfile, "TemporaryFile", hang)
    yield
    release.set()


@pytest.mark.usefixtures("hanging")
async def test_a_volume_that_hangs_is_a_warning(storage: FileStorage) -> None:
    with capture_logs() as lines:
        await storage.check_at_start()
    [line] = lines
    assert (line["log_level"], line["setting"]) == ("warning", "batch_storage")
    assert "no answer within 0.01 s" in line["error"]


async def test_a_bucket_that_is_away_is_a_warning(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for endpoint in (s3_endpoint, "http://127.0.0.1:1"):
        with capture_logs() as lines:
            await FileStorage("s3://no-such-bucket", endpoint_url=endpoint).check_at_start()
        assert [line["log_level"] for line in lines] == ["warning"]
        assert "s3://no-such-bucket: " in lines[0]["error"]


@pytest.mark.parametrize("name", ["b ucket", "ab", "bücket", "a" * 256, "b?x=1", "b*"])
def test_a_name_that_no_bucket_can_have_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be a bucket's name") as caught:
        FileStorage(f"s3://{name}/prefix")
    assert caught.value.field == "batch_storage"


def test_names_that_buckets_have_are_taken() -> None:
    for name in ("batches", "my.bucket-1", "Old_Bucket", "arn:aws:s3:eu-west-1:1:accesspoint/x"):
        assert FileStorage(f"s3://{name}/prefix")._root == f"{name}/prefix"


@pytest.mark.parametrize("url", ["minio", "minio:9000", "ftp://minio", "http://", "http://m:port"])
def test_an_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not http") as caught:
        FileStorage("s3://bucket", endpoint_url=url)
    assert caught.value.field == "batch_storage_endpoint"


async def test_a_gateway_does_not_begin_to_serve(
    no_folder: str, valkey_url: str, queue: str
) -> None:
    settings: dict[str, Any] = {"redis_url": valkey_url, "queues": (queue,), "port": 0}
    server = GatewayServer(GatewaySettings(**settings, batch_storage=no_folder))
    ready: list[bool] = []
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        await server.run(asyncio.Event(), on_ready=lambda: ready.append(True))
    assert not ready


@pytest.mark.parametrize("flags", [["gateway", "--port", "0"], ["tasks"], ["tasks", "--burst"]])
def test_the_command_line_names_the_setting(
    no_folder: str, valkey_url: str, queue: str, flags: list[str]
) -> None:
    command = [sys.executable, "-P", "-m", "inferq", *flags, "--batch-storage", no_folder]
    done = subprocess.run(
        [*command, "--redis-url", valkey_url, "--queues", queue],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("inferq: ")]
    assert said == [f"inferq: batch_storage: {no_folder} cannot be written: Not a directory"]
