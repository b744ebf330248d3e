"""The gateway's settings: from flags and environment, and a wrong one is named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from inferq.cli import main
from inferq.producer.gateway.command import build_parser, read_settings
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InvalidRequestError
from inferq.worker.settings import WorkerSettings

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("INFERQ_")]:
        monkeypatch.delenv(name)


def parse(*arguments: str) -> GatewaySettings:
    return read_settings(vars(build_parser().parse_args(arguments)))


def test_every_setting_has_a_flag_with_its_variable_in_the_help() -> None:
    text = build_parser().format_help()
    for name in GatewaySettings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert GatewaySettings.variable_of(name) in text.replace("\n", "").replace(" ", "")


def test_flags_and_variables_arrive_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", "redis://:s3cret@elsewhere:1/2")
    monkeypatch.setenv("INFERQ_GATEWAY_QUEUES", "chat,code")
    monkeypatch.setenv("INFERQ_GATEWAY_PORT", "81")
    settings = parse("--port", "82", "--models", "m=chat,org/n=code", "--accept-without-workers")
    assert settings.redis_url.get_secret_value() == "redis://:s3cret@elsewhere:1/2"
    assert "s3cret" not in repr(settings)
    assert settings.queues == ("chat", "code")
    assert settings.port == 82
    assert settings.models == {"m": "chat", "org/n": "code"}
    assert settings.accept_without_workers is True


def test_the_queue_is_the_producers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse().queues == ("default",)
    monkeypatch.setenv("INFERQ_QUEUE", "chat")
    assert parse().queues == ("chat",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--redis-url", "http://:pw@h"), r"--redis-url \(INFERQ_REDIS_URL\): must be redis://"),
        (("--queues", "a,b c"), r"--queues \(INFERQ_GATEWAY_QUEUES\): 'b c' must be 1 to 100"),
        (("--queues", "a,a"), "'a' is there twice"),
        (("--queues", ","), "--queues .*at least 1 item"),
        (("--models", "m"), "'m' is not NAME=QUEUE"),
        (("--models", "=default"), "is not a name of 1 to 256 bytes"),
        (("--models", "m=other"), "names a queue that is not in --queues"),
        (("--accept-without-workers",), "--accept-without-workers needs --models"),
        (("--max-body-bytes", "200000000"), "--max-bodies-bytes .* must be at least"),
        (("--port", "65536"), r"--port \(INFERQ_GATEWAY_PORT\)"),
        (("--keep-alive-s", "nan"), "--keep-alive-s"),
        (("--log-level", "info", "--request-timeout-s", "0"), "--request-timeout-s"),
    ],
)
def test_an_impossible_setting_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        parse(*arguments)
    assert "pw" not in str(raised.value)


def test_a_port_in_use_is_bad_input(valkey_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--port", str(valkey_server.port)]) == 2
    assert f"cannot listen on 127.0.0.1 port {valkey_server.port}" in capsys.readouterr().err


def test_the_documentation_has_every_setting() -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    for name in GatewaySettings.model_fields:
        assert f"`--{name.replace('_', '-')}`" in text, name


def test_the_example_environment_has_variables_that_exist() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    assigned = [match[1] for line in lines if (match := re.fullmatch(r"#?(INFERQ_\w+)=.*", line))]
    known = {
        kind.variable_of(name)
        for kind in (WorkerSettings, GatewaySettings, TasksSettings)
        for name in kind.model_fields
    }
    assert set(assigned) <= known | {"INFERQ_CACHE"}
    assert len(set(assigned)) == len(assigned)
    assert {"INFERQ_MODEL", "INFERQ_GATEWAY_API_KEYS_FILE"} <= set(assigned)


def test_the_example_environment_holds_settings_that_are_valid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for line in (ROOT / ".env.example").read_text().splitlines():
        if match := re.fullmatch(r"#?(INFERQ_\w+)=(.*)", line):
            monkeypatch.setenv(match[1], match[2])
    assert GatewaySettings().queues
    assert WorkerSettings().model


def test_a_key_that_only_serve_takes_is_not_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_API_KEY", "secret-word")
    with pytest.raises(InvalidRequestError, match="would serve everybody") as caught:
        read_settings({})
    assert caught.value.field == "INFERQ_API_KEY"
    assert "secret-word" not in str(caught.value)
    keys = tmp_path / "keys.json"
    keys.write_text("[]")
    assert read_settings({"api_keys_file": keys}).api_keys_file == keys
