"""Processes that share an environment each read their own variables, and complain of no other's."""

from __future__ import annotations

import os
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.flags import settings_parser
from inferq.runtime.settings import (
    ProcessSettings,
    check_variable_names,
    load_settings,
    read_list,
    read_pairs,
)
from inferq.worker.settings import check_variable_names as check_worker_names


class ShopSettings(ProcessSettings):
    """Settings of a process that does not exist."""

    model_config = SettingsConfigDict(env_prefix="INFERQ_TASKS_")
    shared: ClassVar[frozenset[str]] = frozenset({"log_level"})
    repeated: ClassVar[frozenset[str]] = frozenset({"names"})

    log_level: str = Field("info", description="Level.")
    size: int = Field(3, ge=1, description="Size in 100% of cases.")
    is_open: bool = Field(False, description="Open.")
    names: Annotated[tuple[str, ...], NoDecode] = Field((), description="Names.")

    @field_validator("names", mode="before")
    @classmethod
    def _read_names(cls, given: Any) -> Any:
        return read_list(given)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("INFERQ_")]:
        monkeypatch.delenv(name)


def parse(*arguments: str) -> ShopSettings:
    parser = settings_parser("shop", ShopSettings, description="Shop.", epilog="")
    return load_settings(ShopSettings, vars(parser.parse_args(arguments)))


def test_a_flag_wins_over_a_variable_and_that_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_TASKS_SIZE", "7")
    monkeypatch.setenv("INFERQ_LOG_LEVEL", "debug")
    monkeypatch.setenv("INFERQ_TASKS_NAMES", "a, b")
    assert parse() == ShopSettings(size=7, log_level="debug", names=("a", "b"))
    assert parse("--size", "8", "--names", "c", "--names", "d,e").names == ("c", "d", "e")
    assert parse("--size", "8").size == 8
    assert parse("--is-open").is_open is True


def test_a_shared_setting_has_no_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ShopSettings.variable_of("log_level") == "INFERQ_LOG_LEVEL"
    assert ShopSettings.variable_of("size") == "INFERQ_TASKS_SIZE"
    monkeypatch.setenv("INFERQ_SIZE", "9")
    assert ShopSettings().size == 3


def test_a_wrong_value_is_named_by_flag_and_variable() -> None:
    with pytest.raises(InvalidRequestError, match=r"--size \(INFERQ_TASKS_SIZE\): .*greater"):
        parse("--size", "0")


def test_a_setting_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        ShopSettings().size = 4  # type: ignore[misc]


def test_a_misspelt_variable_is_an_error_that_knows_the_right_one() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean INFERQ_TASKS_SIZE"):
        check_variable_names(ShopSettings, {"INFERQ_TASKS_SIZ": "1"})
    with pytest.raises(InvalidRequestError, match="did you mean INFERQ_GATEWAY_PORT"):
        check_variable_names(GatewaySettings, {"INFERQ_GATEWAY_PORTS": "1"})


def test_nobody_complains_of_the_variables_of_other_processes() -> None:
    mixed = {
        "INFERQ_MODEL": "m",
        "INFERQ_PARTITIONS": "2",
        "INFERQ_LOG_LEVEL": "info",
        "INFERQ_GATEWAY_PORT": "1",
        "INFERQ_TASKS_SIZE": "1",
        "PATH": "/bin",
    }
    check_worker_names(mixed | {"INFERQ_GATEWAY_NO_SUCH": "", "INFERQ_TASKS_NO_SUCH": ""})
    check_variable_names(ShopSettings, mixed | {"INFERQ_GATEWAY_NO_SUCH": ""})
    check_variable_names(GatewaySettings, mixed | {"INFERQ_TASKS_NO_SUCH": ""})


def test_the_variables_that_kubernetes_makes_of_services_are_no_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links = {
        "INFERQ_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "INFERQ_GATEWAY_SERVICE_PORT": "8000",
        "INFERQ_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "INFERQ_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "INFERQ_GATEWAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "INFERQ_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    for name, value in links.items():
        monkeypatch.setenv(name, value)
    assert load_settings(GatewaySettings, {}).port == 8000
    check_worker_names({name.replace("_GATEWAY", "_VALKEY"): links[name] for name in links})
    with pytest.raises(InvalidRequestError, match="INFERQ_VALKEY_PORT"):
        check_worker_names({"INFERQ_VALKEY_PORT": "6379"})


def test_pairs_and_lists_are_read_from_texts_only() -> None:
    assert read_pairs("a=b, c=d=e", "K=V") == {"a": "b", "c": "d=e"}
    assert read_pairs(["a=b", "c=d"], "K=V") == {"a": "b", "c": "d"}
    assert read_pairs({"a": "b"}, "K=V") == {"a": "b"}
    with pytest.raises(ValueError, match="'x' is not K=V"):
        read_pairs("a=b,x", "K=V")
    with pytest.raises(ValueError, match="'a' is there twice"):
        read_pairs("a=b,a=c", "K=V")
    assert read_list("a, b,,") == ["a", "b"]
    assert read_list(("a",)) == ("a",)
