"""The chart as Helm renders it: every scenario, by Helm 3 and by Helm 4."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm"
SUFFIX = "-values.yaml"
SCENARIOS = sorted(path.name.removesuffix(SUFFIX) for path in (CHART / "ci").glob(f"*{SUFFIX}"))
#: Kinds whose pods are in `spec.template`.
WORKLOADS = ("Deployment", "StatefulSet")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A pod specification, and the object that it stands in."""

    owner: Manifest
    spec: Manifest

    @property
    def name(self) -> str:
        return f"{self.owner['kind']}/{self.owner['metadata']['name']}"

    @property
    def component(self) -> str:
        component: str = self.owner["metadata"]["labels"]["app.kubernetes.io/component"]
        return component

    @property
    def main(self) -> Manifest:
        """The container that the chart makes; others come from values."""
        container: Manifest = self.spec["containers"][0]
        return container


@dataclass
class Rendering:
    """The manifests of one rendering."""

    text: str
    manifests: list[Manifest] = field(init=False)

    def __post_init__(self) -> None:
        loaded = yaml.load_all(self.text, Loader=yaml.CSafeLoader)
        self.manifests = [manifest for manifest in loaded if manifest]

    def of_kind(self, *kinds: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] in kinds]

    def named(self, kind: str, ending: str) -> Manifest:
        [found] = [m for m in self.of_kind(kind) if m["metadata"]["name"].endswith(ending)]
        return found

    @property
    def pods(self) -> list[Pod]:
        workloads = [Pod(m, m["spec"]["template"]["spec"]) for m in self.of_kind(*WORKLOADS)]
        return workloads + [Pod(m, m["spec"]) for m in self.of_kind("Pod")]

    def workers(self) -> Iterator[Pod]:
        return (pod for pod in self.pods if pod.component == "worker")


@dataclass
class Helm:
    """One release of Helm, before the chart; a rendering is made once."""

    program: Path
    rendered: dict[str, Rendering] = field(default_factory=dict)

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.program, *arguments], capture_output=True, text=True, check=False, timeout=60
        )

    def scenario(self, name: str) -> Rendering:
        return self._render(name, ["--values", str(CHART / "ci" / f"{name}{SUFFIX}")])

    def values(self, values: Mapping[str, Any]) -> Rendering:
        """Render with values given as a map."""
        text = json.dumps(values)
        return self._render(text, _as_arguments(values))

    def refusal(self, values: Mapping[str, Any]) -> str:
        """What Helm says instead of rendering these values."""
        done = self.run("template", "release", CHART, *_as_arguments(values))
        assert done.returncode != 0, "these values were rendered"
        return done.stderr

    def _render(self, key: str, arguments: list[str]) -> Rendering:
        if key not in self.rendered:
            done = self.run("template", "release", CHART, "--namespace", "llm", *arguments)
            assert done.returncode == 0, done.stderr
            self.rendered[key] = Rendering(done.stdout)
        return self.rendered[key]


def _as_arguments(values: Mapping[str, Any]) -> list[str]:
    return [
        part
        for name, value in values.items()
        for part in ("--set-json", f"{name}={json.dumps(value)}")
    ]


def load_script(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def chart() -> Path:
    """The chart's folder."""
    return CHART


@pytest.fixture(scope="session")
def chart_files() -> ModuleType:
    """`scripts/chart_files.py`."""
    return load_script("chart_files")


@pytest.fixture(scope="session")
def helm_of() -> Callable[[str], Helm]:
    """Helm by its major version; skips where it is not there, fails in CI."""
    tools = load_script("helm_tools")
    ready: dict[str, Helm] = {}

    def find(major: str) -> Helm:
        [release] = [r for r in tools.RELEASES if r.version.startswith(f"{major}.")]
        program = tools.program_of(release)
        if not program.exists():
            message = f"{program} is not there: run `make helm-tools`"
            if os.environ.get("CI"):
                pytest.fail(message)
            pytest.skip(message)
        return ready.setdefault(major, Helm(program))

    return find


@pytest.fixture(params=["3", "4"], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, helm_of: Callable[[str], Helm]) -> Helm:
    """Each Helm in turn."""
    return helm_of(request.param)


@pytest.fixture
def helm4(helm_of: Callable[[str], Helm]) -> Helm:
    """Helm 4, for what does not depend on its version."""
    return helm_of("4")


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> str:
    """Each scenario of `helm/ci` in turn."""
    name: str = request.param
    return name


@pytest.fixture
def rendering(helm4: Helm, scenario: str) -> Rendering:
    """Each scenario, rendered."""
    return helm4.scenario(scenario)
