"""`inferq webhooks`, and the settings of `inferq tasks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inferq.cli import main
from inferq.producer.tasks.command import read_settings
from inferq.producer.tasks.signing import read_secret
from inferq.protocol.errors import InvalidRequestError


def test_dead_deliveries_are_listed_and_driven_again(
    end_job: Any, burst_until: Any, receiver: Any, make_answer: Any, deliveries: Any,
    valkey_url: str, queue: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    receiver.answers = [make_answer(410)]
    job_id = end_job()
    burst_until(lambda: deliveries(lambda store: store.dead()))
    server = ["--redis-url", valkey_url, "--queue", queue]
    capsys.readouterr()

    assert main(["webhooks", "list", *server]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["ID", "EVENT", "URL", "ATTEMPTS", "TIME", "REASON"]
    assert f"msg_{job_id}" in row
    assert "410" in row
    assert main(["webhooks", "list", "--json", *server]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == job_id
    assert main(["webhooks", "log", *server]) == 0
    assert "dead" in capsys.readouterr().out.splitlines()[1]
    assert main(["webhooks", "redrive", "--all", *server]) == 0
    assert capsys.readouterr().out == f"msg_{job_id}\n"
    assert main(["webhooks", "redrive", f"msg_{job_id}", *server]) == 2
    assert "no dead delivery" in capsys.readouterr().err
    receiver.answers = [make_answer()]
    burst_until(lambda: len(receiver.got) == 2)


def test_a_secret_that_is_made_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["webhooks", "secret"]) == 0
    assert len(read_secret(capsys.readouterr().out.strip())) == 32


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("queues", "a b"),
        ("queues", "a,a"),
        ("redis_url", "http://x"),
        ("webhook_secrets", "default"),
        ("webhook_secrets", "default=whsec_QUJD"),
        ("webhook_secrets", "a=whsec_" + "A" * 32 + ",a=whsec_" + "A" * 32),
        ("webhook_retry_delays_s", ""),
        ("webhook_retry_delays_s", "1,-1"),
        ("webhook_allowed_networks", "10.0.0.1/8"),
        ("webhook_host_rate", "0"),
        ("workers", "0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting: str, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_settings({setting: value})
    assert f"INFERQ_{setting.upper()}" in str(caught.value).replace("TASKS_", "")
    assert "QUJD" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": []}', '{"a": "whsec_x"}', '{"a": "QUJDREVGRw=="}']
)
def test_a_file_of_secrets_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secrets.json"
    file.write_text(text)
    with pytest.raises(InvalidRequestError) as caught:
        read_settings({"webhook_secrets_file": str(file)})
    assert caught.value.field == "webhook_secrets_file"
    assert "QUJD" not in str(caught.value)


def test_a_file_of_secrets_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="No such file"):
        read_settings({"webhook_secrets_file": str(tmp_path / "none.json")})
