"""The first line of a process: what was chosen, and nothing that is secret."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from inferq.runtime.banner import chosen_settings, log_start, masked
from inferq.runtime.shared_settings import ServerSettings

URL = "redis://someone:hidden-word@queue:6380/2?socket_timeout=3"


def test_the_server_is_named_and_the_password_is_not() -> None:
    settings = ServerSettings(redis_url=URL, log_level="debug")  # type: ignore[arg-type]
    with capture_logs() as lines:
        log_start("worker", settings, model="m")
    [line] = lines
    assert (line["event"], line["log_level"], line["process"]) == ("starting", "info", "worker")
    assert (line["server"], line["model"]) == ("redis://queue:6380/2", "m")
    assert line["settings"] == {"redis_url": "***", "log_level": "debug"}
    assert "hidden-word" not in str(line)


def test_what_is_as_by_default_is_not_told() -> None:
    assert chosen_settings(ServerSettings()) == {}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (SecretStr("x"), "***"),
        ("https://me:pw@host/path", "https://***@host/path"),
        ("s3://key:se/cret@bucket", "s3://***@bucket"),
        ("http://host/v1?api_key=x y", "http://host/v1?*** y"),
        ({"a": ("http://u@h", 1)}, {"a": ["http://***@h", 1]}),
        ("me@host", "me@host"),
        (None, None),
        (0.5, 0.5),
    ],
)
def test_secrets_are_masked_wherever_they_are(value: Any, shown: Any) -> None:
    assert masked(value) == shown


def test_a_bad_address_of_a_collector_is_refused() -> None:
    for url in ("collector:4318", "ftp://c", "http://", "http://c:99999", "http://c?x=1"):
        with pytest.raises(ValueError, match="http://HOST"):
            ServerSettings(tracing_endpoint=url)
