"""Settings come from flags and environment, and a wrong one is named."""

from __future__ import annotations

import dataclasses

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.worker.command import build_parser
from inferq.worker.engine.config import EngineConfig
from inferq.worker.settings import (
    ENV_PREFIX,
    EngineSettings,
    WorkerSettings,
    check_variable_names,
    load_settings,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def test_a_flag_wins_over_a_variable_and_that_over_the_default(monkeypatch) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "from-environment")
    monkeypatch.setenv("INFERQ_LEASE_S", "7.5")
    settings = load_settings({"model": "from-flag"})
    assert settings.model == "from-flag"
    assert settings.lease_s == 7.5
    assert settings.block_size == 16


def test_every_setting_has_a_flag_with_its_variable_in_the_help() -> None:
    text = build_parser().format_help()
    for name in WorkerSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in text
        assert f"{ENV_PREFIX}{name.upper()}" in text.replace("\n", "").replace(" ", "")


def test_flags_arrive_as_settings() -> None:
    argv = ["--model", "m", "--no-enable-prefix-caching", "--num-kv-blocks", "64"]
    settings = load_settings(vars(build_parser().parse_args(argv)))
    assert settings.enable_prefix_caching is False
    assert settings.num_kv_blocks == 64


def test_every_option_of_the_engine_is_a_setting_with_the_same_default() -> None:
    options = {f.name: f.default for f in dataclasses.fields(EngineConfig)}
    del options["seed"]  # for requests without one; those of the queue always have one
    del options["model"]
    settings = {name: f.default for name, f in EngineSettings.model_fields.items()}
    del settings["model"]
    assert settings == options


def test_options_of_preemption_arrive() -> None:
    argv = ["--model", "m", "--preemption-mode", "swap", "--swap-space", "0.5", "--enforce-eager"]
    argv += ["--no-async-scheduling"]
    settings = load_settings(vars(build_parser().parse_args(argv)))
    options = {name: getattr(settings, name) for name in EngineSettings.model_fields}
    config = EngineConfig(**options)
    assert (config.preemption_mode, config.swap_space, config.enforce_eager) == ("swap", 0.5, True)
    assert config.async_scheduling is False


def test_adapters_come_as_flags_as_one_text_or_from_a_variable(monkeypatch) -> None:
    expected = {"polite": "/a=b", "terse": "t", "x/y": "z"}
    flags = ["--lora", "polite=/a=b", "--lora-adapters", "terse=t, x/y=z"]
    given = vars(build_parser().parse_args(["--model", "m", *flags]))
    assert load_settings(given).lora_adapters == expected
    monkeypatch.setenv("INFERQ_LORA_ADAPTERS", "polite=/a=b,terse=t,x/y=z")
    settings = load_settings({"model": "m", "max_lora_rank": "16"})
    options = {name: getattr(settings, name) for name in EngineSettings.model_fields}
    config = EngineConfig(**options)
    assert (config.lora_adapters, config.max_lora_rank) == (expected, 16)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("polite", "--lora-adapters .*'polite' is not NAME=FOLDER"),
        ("a=x,a=y", "--lora-adapters .*'a' is there twice"),
        ("=x", "--lora-adapters .*names of 1 to 256 bytes"),
        ("a=", "--lora-adapters .*a folder for 'a'"),
        ("n=x", "--lora-adapters: 'n' is the name of the model itself"),
    ],
)
def test_an_adapter_without_a_name_of_its_own_is_refused(given: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        load_settings({"model": "m/n", "lora_adapters": given})


def test_a_missing_model_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="--model"):
        load_settings({})


def test_an_impossible_value_is_named_with_its_bound() -> None:
    with pytest.raises(InvalidRequestError, match=r"--block-size.*256"):
        load_settings({"model": "m", "block_size": "100000"})


@pytest.mark.parametrize(
    "url",
    [
        "http://s3cret@x",
        "redis://host:s3cret",
        "redis://:s3cret@host/first",
        "redis://:s3cret/a@host",
        "redis://:s3cret@host?no_such_option=1",
        "redis://:s3cret@[::1",
        "unix://",
        "s3cret",
        "",
    ],
)
def test_a_url_that_is_none_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"--redis-url.*must be redis://") as refused:
        load_settings({"model": "m", "redis_url": url})
    assert "s3cret" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["redis://h", "rediss://u:p@h:1/3", "unix:///run/redis.sock?db=1", "redis://:%2F@[::1]"]
)
def test_each_form_of_a_url_is_taken(url: str) -> None:
    settings = load_settings({"model": "m", "redis_url": url})
    assert settings.redis_url.get_secret_value() == url


FLOATS = [name for name, field in WorkerSettings.model_fields.items() if "float" in f"{field!r}"]


@pytest.mark.parametrize("value", ["inf", "nan", "1e300"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_has_an_end(name: str, value: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"--{name.replace('_', '-')} ") as refused:
        load_settings({"model": "m", name: value})
    assert "\n" not in str(refused.value)


def test_results_are_kept_for_two_leases_at_least() -> None:
    with pytest.raises(InvalidRequestError, match=r"--retention-s \(39\).*--lease-s \(20\)"):
        load_settings({"model": "m", "retention_s": "39"})
    assert load_settings({"model": "m", "retention_s": "40"}).retention_s == 40


def test_two_workers_of_one_host_and_process_id_have_two_names() -> None:
    first, second = (load_settings({"model": "m"}).worker_name for _ in range(2))
    assert first != second
    assert first.rsplit("-", 1)[0] == second.rsplit("-", 1)[0]


def test_the_help_shows_the_default_url_and_flags_are_not_abbreviated() -> None:
    assert "redis://127.0.0.1:6379/0" in build_parser().format_help()
    assert "***" not in build_parser().format_help()
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--mod", "m"])


def test_a_misspelt_variable_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean INFERQ_MAX_MODEL_LEN"):
        check_variable_names({"INFERQ_MAX_MODELLEN": "1"})


def test_a_wrong_choice_of_kernels_is_refused_at_the_start(monkeypatch) -> None:
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "foo")
    with pytest.raises(InvalidRequestError, match="INFERQ_NATIVE_KERNELS: is 'foo': choose auto"):
        load_settings({"model": "m"})
    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "")
    assert load_settings({"model": "m"}).model == "m"


@pytest.mark.parametrize("name", ["queue", "served_model_name"])
def test_an_empty_name_is_not_one_that_was_left_out(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"--{name.replace('_', '-')} .*must"):
        load_settings({"model": "m", name: ""})


def test_settings_do_not_change_once_read() -> None:
    settings = load_settings({"model": "m"})
    with pytest.raises(ValueError, match="frozen"):
        settings.lease_s = 1.0


def test_the_password_does_not_show_in_the_settings() -> None:
    settings = load_settings({"model": "m", "redis_url": "redis://:s3cret@host/0"})
    assert "s3cret" not in repr(settings)


def test_the_model_goes_by_the_last_part_of_its_path() -> None:
    assert load_settings({"model": "org/name"}).model_name == "name"
    assert load_settings({"model": "a", "served_model_name": "b"}).model_name == "b"
