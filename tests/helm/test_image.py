"""The Dockerfile: clean, and true to the packages, the command line and the settings."""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from inferq import healthcheck
from inferq.producer.gateway.settings import GatewaySettings
from inferq.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> dict[str, str]:
    """The text of each stage, by its name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_hadolint_finds_nothing() -> None:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [program, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_made_of_every_package_and_nothing_else() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", stages()["wheel"], flags=re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"].values()
    folders = {path.split("/")[0] for path in mapped}
    assert sources == folders | {"pyproject.toml", "README.md", "LICENSE"}


def test_what_the_build_copies_passes_the_ignore_file_and_nothing_secret_does() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, flags=re.MULTILINE)
    assert let_in == {name for line in copied for name in line.split()}
    for path in (".git", ".env", ".venv", "tests"):
        assert not any(fnmatch.fnmatch(path, name) for name in let_in)


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_holds_the_wheel_runs_as_a_user_and_trusts_no_folder(target: str) -> None:
    stage = stages()[target]
    assert "COPY inferq" not in stage
    assert re.findall(r"^COPY (.+)$", stage, flags=re.MULTILINE) == [
        f"--from={target}-packages /opt/inferq /opt/inferq"
    ]
    assert re.search(r"^USER 10001:10001$", stage, flags=re.MULTILINE)
    assert "PYTHONSAFEPATH=1" in stage
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in stage
    assert f'CMD ["{target}"]' in stage
    [extras] = re.findall(r'"inferq\[([\w,]+)\] @', stages()[f"{target}-packages"])
    assert extras == {"gateway": "gateway,tasks,s3,tracing,cli", "worker": "worker,tracing"}[target]
    assert set(extras.split(",")) <= set(PYPROJECT["project"]["optional-dependencies"])


@pytest.mark.parametrize(
    ("target", "kind"), [("gateway", GatewaySettings), ("worker", WorkerSettings)]
)
def test_the_variables_of_an_image_are_settings(target: str, kind) -> None:
    given = re.findall(r"\b(INFERQ_\w+)=", stages()[target])
    assert given
    assert set(given) <= {kind.variable_of(name) for name in kind.model_fields}


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_the_health_check_is_our_program_and_the_port_of_the_image_is_exposed(target: str) -> None:
    stage = stages()[target]
    [command] = re.findall(r"^    CMD (\[.+\])$", stage, flags=re.MULTILINE)
    assert ast.literal_eval(command) == ["python", "-m", healthcheck.__name__]
    [port] = re.findall(r"INFERQ_\w+_PORT=(\d+)", stage)
    assert f"EXPOSE {port}\n" in stage


def test_every_package_of_the_images_is_pinned() -> None:
    script = ROOT / "scripts" / "image_packages.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    held, tested = (
        dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), flags=re.MULTILINE))
        for name in ("image-constraints.txt", "constraints.txt")
    )
    common = held.keys() & tested.keys()
    assert "redis" in held
    assert {name: held[name] for name in common} == {name: tested[name] for name in common}
    for target in ("gateway", "worker"):
        stage = stages()[f"{target}-packages"]
        assert "COPY image-constraints.txt /constraints.txt" in stage
        assert "--constraint /constraints.txt" in stage


def test_the_bases_are_pinned() -> None:
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", TEXT, flags=re.MULTILINE)
    assert len(images) == 2
    for image in images:
        assert re.search(r":\d+\.\d+\.\d+", image), image
