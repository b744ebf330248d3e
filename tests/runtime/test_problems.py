"""What is wrong with a setting is said in the project's words, whatever is wrong with it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from inferq.producer.gateway.admission.keys import KeyRing
from inferq.producer.gateway.settings import GatewaySettings
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.settings import ProcessSettings, load_settings
from inferq.worker.settings import WorkerSettings

MODELS = (WorkerSettings, GatewaySettings, TasksSettings)
#: What pydantic says itself.
FOREIGN = re.compile(
    r"\b(Input|String|Tuple|List|Dictionary|Value|Field|Extra|Unable|should|validation)\b"
)
#: Values that are wrong for one kind of setting or another.
WRONG: tuple[Any, ...] = (
    *("", " ", ",", ",,", "x", "1.5", "-1", "-0.5", "nan", "inf", "1e300", "9" * 5000, "9" * 300),
    *("x=", "=x", "a=b,a=b", "x" * 5000, "\udcff", ",".join(map(str, range(200))), "1,x", "a b"),
    *(None, [], {}, ["x"], [None], {"a": None}, {"a": "b"}, b"\xff", 1, -1, 10**30, 1.5, object()),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("INFERQ_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", MODELS)
def test_no_setting_is_refused_in_pydantics_words(kind: type[ProcessSettings]) -> None:
    said = []
    for name in kind.model_fields:
        for value in WRONG:
            given = {"model": "m"} if kind is WorkerSettings else {}
            try:
                load_settings(kind, given | {name: value})
            except InvalidRequestError as error:
                said.append(str(error))
    assert [text for text in said if FOREIGN.search(text)] == []
    assert len(said) > 5 * len(kind.model_fields)


@pytest.mark.parametrize("kind", MODELS)
def test_no_secret_is_shown_when_it_is_refused(kind: type[ProcessSettings]) -> None:
    for name, setting in kind.model_fields.items():
        if setting.annotation in (SecretStr, SecretStr | None):
            with pytest.raises(InvalidRequestError) as refused:
                load_settings(kind, {"model": "m", name: "s3cret\udcff"})
            assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"queues": ",,"}, "--queues (INFERQ_GATEWAY_QUEUES): must have at least 1 item"),
        ({"port": "x"}, "--port (INFERQ_GATEWAY_PORT): must be a whole number"),
        ({"port": "65536"}, "--port (INFERQ_GATEWAY_PORT): must be less than or equal to 65535"),
        (
            {"keep_alive_s": "0"},
            "--keep-alive-s (INFERQ_GATEWAY_KEEP_ALIVE_S): must be greater than 0",
        ),
        ({"keep_alive_s": "nan"}, "must be a finite number"),
        ({"host": ""}, "--host (INFERQ_GATEWAY_HOST): must have at least 1 character"),
        ({"accept_webhooks": "maybe"}, "must be true or false"),
        ({"tool_format": "xml"}, "must be 'hermes' or 'json'"),
        (
            {"api_keys_file": ""},
            "--api-keys-file (INFERQ_GATEWAY_API_KEYS_FILE): must not be empty",
        ),
        ({"colour": "red"}, "--colour (INFERQ_GATEWAY_COLOUR): is not known"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        load_settings(GatewaySettings, given)


def test_an_item_of_a_list_is_named_by_its_place() -> None:
    with pytest.raises(InvalidRequestError, match="item 2 must be a number"):
        load_settings(TasksSettings, {"webhook_retry_delays_s": "1,x"})


def test_a_wrong_default_queue_is_named_by_the_variable_that_gave_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_QUEUE", "")
    with pytest.raises(InvalidRequestError, match="settings: INFERQ_QUEUE: '' must be 1 to 100"):
        load_settings(GatewaySettings, {})
    assert load_settings(GatewaySettings, {"queues": "a"}).queues == ("a",)
    monkeypatch.setenv("INFERQ_GATEWAY_QUEUES", "a b")
    with pytest.raises(InvalidRequestError, match=r"--queues \(INFERQ_GATEWAY_QUEUES\): 'a b'"):
        load_settings(GatewaySettings, {})


@pytest.mark.parametrize("field", ["name", "sha256", "models", "lanes", "requests_per_minute"])
def test_no_file_of_keys_is_refused_in_pydantics_words(field: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    good = {"name": "a", "sha256": "0" * 64}
    contents: list[Any] = ["", "[]", "{}", "[1]", '"x"', "[{}]", "[", json.dumps([good] * 5000)]
    values = ("", "x", None, [], {}, 0, -1, 1.5, 2**40, True, [1], ["x"])
    contents += [json.dumps([good | {field: value}]) for value in values]
    contents.append(json.dumps([good | {"key": "k"}]))
    said = []
    for content in contents:
        file.write_text(content)
        try:
            KeyRing(file)
        except InvalidRequestError as error:
            said.append(str(error))
    assert [text for text in said if FOREIGN.search(text)] == []
    assert len(said) >= 10
