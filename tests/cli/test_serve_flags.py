"""The flags of `inferq serve`: each reaches the part that it is for, and clashes are refused."""

from __future__ import annotations

import re

import pytest

from inferq.cli.serve_flags import ServePlan, build_parser, read_plan
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.worker.settings import WorkerSettings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERQ_REDIS_URL", "INFERQ_QUEUE", "INFERQ_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def plan(*flags: str) -> ServePlan:
    return read_plan(["some-model", *flags])


def test_every_setting_of_both_parts_is_a_flag_and_the_help_says_whose() -> None:
    text = build_parser().format_help()
    flags = set(re.findall(r"--[a-z0-9-]+", text))
    for kind in (WorkerSettings, GatewaySettings):
        names = {name for name in kind.model_fields if name != "model"}
        assert {f"--{name.replace('_', '-')}" for name in names} <= flags
    assert text.index("\nworker and gateway:") < text.index("\ngateway:") < text.index("\nworker:")


def test_a_flag_goes_to_the_part_that_it_is_for() -> None:
    made = plan("--port", "9000", "--max-model-len", "64", "--lora", "a=x", "--lora", "b=y")
    assert "--port=9000" in made.gateway_command.arguments
    assert "--port=9000" not in made.worker_command.arguments
    assert made.worker.max_model_len == 64
    assert made.worker.lora_adapters == {"a": "x", "b": "y"}
    assert "--model=some-model" in made.worker_command.arguments


def test_a_flag_of_both_goes_to_both() -> None:
    made = plan("--retention-s", "100", "--log-level", "warning")
    for command in (made.worker_command, made.gateway_command):
        assert {"--retention-s=100", "--log-level=warning"} <= set(command.arguments)


def test_batches_bring_a_tasks_process_for_the_gateway_s_queues() -> None:
    assert plan("--queue", "chat").tasks_command is None
    made = plan("--queue", "chat", "--batch-storage", "files", "--log-level", "warning")
    assert made.tasks is not None
    assert made.tasks_command is not None
    arguments = set(made.tasks_command.arguments)
    assert {"--queues=chat", "--batch-storage=files", "--log-level=warning"} <= arguments
    assert (made.tasks.queues, made.tasks.workers) == (("chat",), 1)
    assert "--batch-storage=files" in made.gateway_command.arguments


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_reaches_its_part_as_it_was_given(value: bool) -> None:
    flag = "--enable-prefix-caching" if value else "--no-enable-prefix-caching"
    made = plan(flag)
    assert made.worker.enable_prefix_caching is value
    assert flag in made.worker_command.arguments


def test_the_gateway_offers_the_queue_that_the_worker_serves() -> None:
    assert plan("--queue", "chat").gateway.queues == ("chat",)
    assert plan("--queue", "chat", "--queues", "code,chat").gateway.queues == ("code", "chat")
    with pytest.raises(InvalidRequestError, match="--queues: the worker's queue 'chat'"):
        plan("--queue", "chat", "--queues", "code")


def test_a_partition_that_the_gateway_does_not_know_is_refused() -> None:
    assert plan("--partition", "1", "--partitions", "2").worker.partition == 1
    with pytest.raises(InvalidRequestError, match="--partitions"):
        plan("--partition", "1")


def test_the_servers_url_is_no_argument_of_a_process() -> None:
    made = plan("--redis-url", "redis://:secret@host:6379/0")
    assert not made.is_embedded
    assert "secret" not in repr(made)
    for command in (made.worker_command, made.gateway_command):
        assert command.variables == {"INFERQ_REDIS_URL": "redis://:secret@host:6379/0"}
        assert not any("secret" in argument for argument in command.arguments)


def test_with_a_server_of_its_own_a_worker_hands_nothing_over() -> None:
    assert plan().is_embedded
    assert plan().worker.drain_timeout_s == 0
    assert plan("--drain-timeout-s", "3").worker.drain_timeout_s == 3
    assert plan("--redis-url", "redis://host").worker.drain_timeout_s == 25


def test_a_url_in_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_REDIS_URL", "redis://host:6380")
    assert not plan().is_embedded
    assert plan().worker.redis_url.get_secret_value() == "redis://host:6380"


def test_the_port_0_becomes_a_free_one() -> None:
    assert plan("--port", "0").gateway.port > 0


def test_a_key_comes_by_flag_or_variable_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan("--api-key", "sk-flag").api_key == "sk-flag"
    monkeypatch.setenv("INFERQ_API_KEY", "sk-variable")
    assert plan().api_key == "sk-variable"
    assert plan("--api-key", "sk-flag").api_key == "sk-flag"
    assert "sk-" not in repr(plan())


@pytest.mark.parametrize("key", ["two words", "käse", "x" * 513, "line\nend"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequestError, match="--api-key"):
        plan("--api-key", key)


def test_an_empty_key_does_not_open_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="--api-key: is empty: to serve without a key"):
        plan("--api-key", "")
    monkeypatch.setenv("INFERQ_API_KEY", "")
    with pytest.raises(InvalidRequestError, match="INFERQ_API_KEY: is empty: to serve without"):
        plan()
    with pytest.raises(InvalidRequestError, match="--api-key: is empty"):
        plan("--api-key", "")
    assert plan("--api-key", "sk-flag").api_key == "sk-flag"


def test_a_key_in_a_variable_that_no_header_can_carry_is_named_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_API_KEY", "two words")
    with pytest.raises(InvalidRequestError, match="INFERQ_API_KEY: may hold printable ASCII"):
        plan()


@pytest.mark.parametrize(
    "variable", ["INFERQ_GATEWAY_API_KEYS_FILE", "INFERQ_TASKS_WEBHOOK_SECRETS_FILE"]
)
def test_an_empty_file_of_secrets_is_refused(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")
    with pytest.raises(InvalidRequestError, match=rf"\({variable}\): must not be empty"):
        plan("--batch-storage", "files")


def test_an_empty_url_is_not_one_that_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="--redis-url"):
        plan("--redis-url", "")
    monkeypatch.setenv("INFERQ_REDIS_URL", "")
    with pytest.raises(InvalidRequestError, match="INFERQ_REDIS_URL"):
        plan()


def test_an_empty_queue_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"--queue .*'' must be 1 to 100"):
        plan("--queue", "")


def test_one_key_and_a_file_of_keys_is_a_contradiction() -> None:
    with pytest.raises(InvalidRequestError, match="--api-keys-file"):
        plan("--api-key", "sk-flag", "--api-keys-file", "keys.json")


def test_without_a_model_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match="MODEL: give a folder"):
        read_plan([])
    monkeypatch.setenv("INFERQ_MODEL", "from-the-environment")
    assert read_plan([]).worker.model == "from-the-environment"


def test_a_misspelt_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERQ_GATEWAY_PROT", "1")
    with pytest.raises(InvalidRequestError, match="did you mean INFERQ_GATEWAY_PORT"):
        plan()
