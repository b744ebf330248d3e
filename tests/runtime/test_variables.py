"""Every part may start from one environment: each knows the variables of all, and tells misspelt.

The list that each part has is held against the settings models, the code and the documentation.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inferq.cli.flags import place_of
from inferq.cli.parser import build_parser
from inferq.cli.serve_flags import read_plan
from inferq.kernels.native import mode
from inferq.producer.gateway.command import read_settings as read_gateway_settings
from inferq.producer.tasks.settings import TasksSettings
from inferq.protocol.errors import InvalidRequestError
from inferq.runtime.settings import ProcessSettings, load_settings
from inferq.runtime.variables import (
    ENV_PREFIX,
    GATEWAY_PREFIX,
    TASKS_PREFIX,
    VARIABLES,
    check_variables,
)
from inferq.worker.settings import load_settings as load_worker_settings

ROOT = Path(__file__).parents[2]
PACKAGES = ("inferq", "protocol", "producer", "worker", "kernels")
#: A macro of the kernels' sources, and what tests alone read.
OTHER_NAMES = re.compile(r"INFERQ_EXPORT|INFERQ_FUZZ_\w+")

#: Possible values of settings whose default is none, by variable.
VALUES = {
    "INFERQ_REDIS_URL": "redis://127.0.0.1:1/0",
    "INFERQ_QUEUE": "default",
    "INFERQ_TRACING_ENDPOINT": "http://localhost:4318",
    "INFERQ_BATCH_STORAGE": "{folder}/batches",
    "INFERQ_BATCH_STORAGE_ENDPOINT": "http://localhost:9000",
    "INFERQ_MODEL": "org/model",
    "INFERQ_REVISION": "main",
    "INFERQ_SERVED_MODEL_NAME": "small",
    "INFERQ_QUANTIZATION": "int8",
    "INFERQ_MAX_MODEL_LEN": "64",
    "INFERQ_KV_CACHE_MEMORY": "1000000",
    "INFERQ_NUM_KV_BLOCKS": "64",
    "INFERQ_MAX_PREFILL_DELAY_MS": "0",
    "INFERQ_SWAP_SPACE": "0",
    "INFERQ_NUM_SWAP_BLOCKS": "0",
    "INFERQ_ASYNC_SCHEDULING": "false",
    "INFERQ_LORA_ADAPTERS": "polite=./polite",
    "INFERQ_WORKER_NAME": "one",
    "INFERQ_HEALTH_HOST": "127.0.0.1",
    "INFERQ_GATEWAY_QUEUES": "default,code",
    "INFERQ_GATEWAY_METRICS_PORT": "0",
    "INFERQ_GATEWAY_METRICS_HOST": "127.0.0.1",
    "INFERQ_GATEWAY_MODELS": "small=default",
    "INFERQ_GATEWAY_API_KEYS_FILE": "{folder}/keys.json",
    "INFERQ_GATEWAY_CORS_ORIGINS": "*",
    "INFERQ_GATEWAY_DEFAULT_MAX_TOKENS": "16",
    "INFERQ_TASKS_QUEUES": "default,code",
    "INFERQ_TASKS_WEBHOOK_SECRETS": "default=whsec_" + "A" * 32,
    "INFERQ_TASKS_WEBHOOK_SECRETS_FILE": "{folder}/secrets.json",
    "INFERQ_TASKS_WEBHOOK_RETRY_DELAYS_S": "1,2",
    "INFERQ_TASKS_WEBHOOK_ALLOWED_NETWORKS": "10.1.0.0/16",
    "INFERQ_TASKS_HEALTH_HOST": "127.0.0.1",
    "INFERQ_API_KEY": "sk-key",
    "INFERQ_CACHE": "{folder}",
    "INFERQ_NATIVE_KERNELS": "auto",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def models() -> set[type[ProcessSettings]]:
    """Return the settings of each kind of process: the models that no other refines."""
    for path in sources():
        if re.search(r"^class \w+Settings\(", path.read_text(), re.MULTILINE):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            importlib.import_module(f"inferq.{module.removeprefix('inferq.')}")
    found: set[type[ProcessSettings]] = set()
    left = [ProcessSettings]
    while left:
        kind = left.pop()
        refined = [each for each in kind.__subclasses__() if each.__module__.startswith("inferq.")]
        left += refined
        if not refined:
            found.add(kind)
    return found


def of_models() -> dict[str, object]:
    """Return every variable of a settings model, with its setting's default."""
    return {
        kind.variable_of(name): setting.default
        for kind in models()
        for name, setting in kind.model_fields.items()
    }


def read_by_code() -> set[str]:
    """Return every text in the sources that is the name of a variable and nothing else."""
    return {
        node.value
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"INFERQ_[A-Z0-9_]*[A-Z0-9]", node.value)
    }


def documented() -> set[str]:
    """Return every variable that the documentation, images, chart and examples name."""
    paths = [ROOT / name for name in ("README.md", ".env.example", "Dockerfile", "Makefile")]
    for folder in ("docs", "helm", "examples"):
        paths += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = (path.read_text(errors="replace") for path in paths)
    names = {name for text in texts for name in re.findall(r"\bINFERQ_[A-Z0-9_]+", text)}
    return {name for name in names if not name.endswith("_") and not OTHER_NAMES.fullmatch(name)}


def all_values(folder: Path) -> dict[str, str]:
    """Return a possible value of every variable that there is."""
    values = {}
    for name, default in {**dict.fromkeys(read_by_code()), **of_models()}.items():
        values[name] = VALUES.get(name, str(default)).format(folder=folder)
    return values


def start_worker() -> None:
    load_worker_settings({})


def start_gateway() -> None:
    read_gateway_settings({})


def start_tasks() -> None:
    load_settings(TasksSettings, {}).read_secrets()


def start_serve() -> None:
    read_plan([])


def start_command() -> None:
    place_of(build_parser().parse_args(["queue"]))


#: What each part does with its environment at its start.
PARTS: dict[str, Callable[[], None]] = {
    "worker": start_worker,
    "gateway": start_gateway,
    "tasks": start_tasks,
    "serve": start_serve,
    "a command": start_command,
}
parts = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS.keys())


def test_the_list_has_every_variable_and_no_other() -> None:
    assert {kind.__name__ for kind in models()} >= {
        *("WorkerSettings", "GatewaySettings", "TasksSettings"),
    }
    assert of_models().keys() | read_by_code() == VARIABLES
    assert {"INFERQ_API_KEY", "INFERQ_CACHE", mode.VARIABLE} <= read_by_code()


def test_the_documentation_names_only_variables_that_there_are() -> None:
    assert documented() <= VARIABLES
    assert len(documented()) > 30


@parts
def test_a_part_starts_with_every_variable_set(
    part: Callable[[], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secrets.json").write_text("{}")
    values = all_values(tmp_path)
    assert values.keys() == VARIABLES
    for name, value in values.items():
        # one key, or a file of several: `inferq serve` takes no both
        if part is not start_serve or name != "INFERQ_GATEWAY_API_KEYS_FILE":
            monkeypatch.setenv(name, value)
    part()


@parts
@pytest.mark.parametrize("commented", [False, True])
def test_a_part_starts_with_the_example_environment(
    part: Callable[[], None], commented: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secrets.json").write_text("{}")
    for line in (ROOT / ".env.example").read_text().splitlines():
        if match := re.fullmatch(r"(#?)(INFERQ_\w+)=(.*)", line):
            if match[1] and not commented:
                continue
            monkeypatch.setenv(match[2], match[3])
    part()


@parts
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("INFERQ_REDIS_ULR", "INFERQ_REDIS_URL"),
        ("INFERQ_QEUE", "INFERQ_QUEUE"),
        ("INFERQ_PARTITONS", "INFERQ_PARTITIONS"),
        ("INFERQ_GATEWY_PORT", "INFERQ_GATEWAY_PORT"),
        ("INFERQ_BATCH_STORGE", "INFERQ_BATCH_STORAGE"),
    ],
)
def test_a_misspelt_variable_is_noticed_by_every_part(
    part: Callable[[], None], name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "m")
    monkeypatch.setenv(name, "x")
    with pytest.raises(InvalidRequestError, match=f"{name}: no such setting; did you mean {meant}"):
        part()


@parts
def test_all_misspelt_variables_are_named_at_once(
    part: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERQ_MODEL", "m")
    for name in ("INFERQ_REDIS_ULR", "INFERQ_QEUE", "INFERQ_ZZZZZZZZZZ"):
        monkeypatch.setenv(name, "x")
    with pytest.raises(InvalidRequestError) as refused:
        part()
    assert str(refused.value) == (
        "settings: INFERQ_QEUE: no such setting; did you mean INFERQ_QUEUE? "
        "INFERQ_REDIS_ULR: no such setting; did you mean INFERQ_REDIS_URL? "
        "INFERQ_ZZZZZZZZZZ: no such setting"
    )


def test_misspelt_variables_and_impossible_values_are_named_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INFERQ_REDIS_ULR", "x")
    monkeypatch.setenv("INFERQ_GATEWAY_PORT", "x")
    monkeypatch.setenv("INFERQ_GATEWAY_HOST", "")
    with pytest.raises(InvalidRequestError) as refused:
        start_gateway()
    for name in ("INFERQ_REDIS_ULR", "INFERQ_GATEWAY_PORT", "INFERQ_GATEWAY_HOST"):
        assert name in str(refused.value)


def test_the_variables_of_a_process_are_its_own_to_check() -> None:
    names = {"INFERQ_GATEWAY_NO_SUCH": "x", "INFERQ_TASKS_NO_SUCH": "x"}
    check_variables(names)
    with pytest.raises(InvalidRequestError, match=r"^INFERQ_GATEWAY_NO_SUCH: no such setting"):
        check_variables(names, prefix=GATEWAY_PREFIX)
    with pytest.raises(InvalidRequestError, match=r"^INFERQ_TASKS_NO_SUCH: no such setting"):
        check_variables(names, prefix=TASKS_PREFIX)
