"""Which server and queue a command acts on: none other than was meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from inferq.cli import demo
from inferq.cli.flags import Place, place_of
from inferq.cli.parser import build_parser
from inferq.protocol.errors import InvalidRequestError

RunHere = Callable[..., tuple[int, str, str]]
Doctor = Callable[..., tuple[int, dict[tuple[str, str], dict[str, Any]]]]


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield each command with flags of a server, and words for what it cannot do without."""
    subparsers = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in subparsers:
        for name, inner in action.choices.items():
            yield from commands(inner, (*words, name))
    if not subparsers and any("--queue" in a.option_strings for a in parser._actions):
        needed = [a for a in parser._actions if not a.option_strings]
        yield (*words, *("x" for _ in needed))


#: All but the doctor, which tells of it in its report.
COMMANDS = [words for words in commands(build_parser()) if words != ("doctor",)]
each_command = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def test_commands_of_all_kinds_are_looked_at() -> None:
    names = {" ".join(words).removesuffix(" x").removesuffix(" x") for words in COMMANDS}
    assert names >= {
        *("submit", "result", "status", "cancel", "queue", "workers", "drain", "top"),
        *("dead list", "dead show", "dead drop", "dead redrive"),
        *("batch run", "batch list", "batch status", "batch cancel"),
        *("webhooks list", "webhooks log", "webhooks redrive"),
    }


@each_command
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--queue=", "inferq: --queue: must be 1 to 100 letters"),
        ("--redis-url=", "inferq: --redis-url: must be redis://"),
    ],
)
def test_an_empty_flag_is_not_one_that_was_left_out(
    run_here: RunHere, words: tuple[str, ...], flag: str, message: str
) -> None:
    code, output, errors = run_here(*words, flag)
    assert (code, output) == (2, "")
    assert errors.startswith(message)


@each_command
def test_a_misspelt_variable_is_refused_before_anything_is_done(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("INFERQ_REDIS_ULR", "redis://nowhere")
    code, output, errors = run_here(*words)
    assert (code, output) == (2, "")
    assert errors == "inferq: INFERQ_REDIS_ULR: no such setting; did you mean INFERQ_REDIS_URL?\n"


def test_flags_win_over_variables_and_those_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("INFERQ_REDIS_URL", "INFERQ_QUEUE", "INFERQ_PARTITIONS"):
        monkeypatch.delenv(name, raising=False)
    read = build_parser().parse_args
    assert place_of(read(["queue"])) == Place("redis://127.0.0.1:6379/0", "default", 1)
    monkeypatch.setenv("INFERQ_REDIS_URL", "redis://:s3cret@one")
    monkeypatch.setenv("INFERQ_QUEUE", "chat")
    monkeypatch.setenv("INFERQ_PARTITIONS", "2")
    assert place_of(read(["queue"])) == Place("redis://:s3cret@one", "chat", 2)
    assert "s3cret" not in repr(place_of(read(["queue"])))
    flags = ["--redis-url", "redis://two", "--queue", "code", "--partitions", "3"]
    assert place_of(read(["queue", *flags])) == Place("redis://two", "code", 3)


@pytest.mark.parametrize("name", ["INFERQ_REDIS_URL", "INFERQ_QUEUE"])
def test_an_empty_variable_is_refused_as_by_a_worker(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "")
    with pytest.raises(InvalidRequestError, match=rf"^{name}: must be"):
        place_of(build_parser().parse_args(["queue"]))


@pytest.mark.parametrize("flag", ["--queue", "--redis-url"])
def test_the_doctor_reports_an_empty_flag(run_here: RunHere, flag: str) -> None:
    code, output, _ = run_here("doctor", "--only", "redis", f"{flag}=")
    assert code == 1
    assert f"FAILURE  connection  {flag}: must be" in output


def test_an_empty_name_of_a_key_lists_no_batches(run_here: RunHere) -> None:
    code, output, errors = run_here("batch", "list", "--key=")
    assert (code, output) == (2, "")
    assert "--key: is empty" in errors


def test_the_demo_s_worker_gets_no_settings_that_are_meant_for_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    for name, value in {
        "INFERQ_PARTITION": "3",
        "INFERQ_HEALTH_PORT": "8081",
        "INFERQ_REDIS_ULR": "x",
        "INFERQ_CACHE": "/cache",
        "INFERQ_NATIVE_KERNELS": "off",
    }.items():
        monkeypatch.setenv(name, value)
    started: list[dict[str, Any]] = []

    class Process:
        def __init__(self, *_: object, **options: Any) -> None:
            started.append(options["environment"])

        def end(self, _: float) -> None:
            pass

    monkeypatch.setattr(demo, "ManagedProcess", Process)
    with demo._worker(tmp_path, "redis://here", tmp_path):
        pass
    [environment] = started
    assert environment["INFERQ_REDIS_URL"] == "redis://here"
    taken = {name for name, value in environment.items() if value is None}
    assert taken >= {"INFERQ_PARTITION", "INFERQ_HEALTH_PORT", "INFERQ_REDIS_ULR"}
    assert not taken & {"INFERQ_CACHE", "INFERQ_NATIVE_KERNELS"}
