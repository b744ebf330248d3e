"""The code of the pages for newcomers runs as it stands, against a worker that is a stand-in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.model

DOCS = Path(__file__).resolve().parents[3] / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
#: Where the pages say that the gateway listens.
DOCUMENTED_GATEWAY = "http://127.0.0.1:8000"
#: What installs, or runs until it is told to stop; other tests do that.
NOT_RUN = re.compile(
    r"^(make|pip|docker|valkey-server|inferq (serve|worker|gateway|tasks|model))\b", re.M
)
#: Needs a real model.
OFFLINE = "LLM("
TIMEOUT_S = 100


def blocks(page: str, language: str) -> list[str]:
    found = FENCE.findall((DOCS / page).read_text())
    return [text for kind, text in found if kind == language]


SHELL_BLOCKS = [text for text in blocks("quickstart.md", "sh") if not NOT_RUN.search(text)]


@pytest.fixture
def environment(valkey_url: str, queue: str) -> dict[str, str]:
    folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "INFERQ_REDIS_URL": valkey_url,
        "INFERQ_QUEUE": queue,
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", ["quickstart.md", "sdk.md"])
def test_the_python_of_a_page_runs_from_its_beginning_to_its_end(
    stand_in_worker: Any, environment: dict[str, str], page: str
) -> None:
    code = [text for text in blocks(page, "python") if OFFLINE not in text]
    assert len(code) >= 3
    output = run([sys.executable, "-P", "-c", "\n".join(code)], environment)
    assert "Usage(" in output


@pytest.mark.slow
def test_the_engine_without_a_queue_runs_as_the_page_has_it(
    smollm2: Path, environment: dict[str, str]
) -> None:
    assert smollm2.is_dir()
    first, *rest = blocks("sdk.md", "python")
    (code,) = [text for text in rest if OFFLINE in text]
    imports = "\n".join(line for line in first.splitlines() if "import" in line)
    assert run([sys.executable, "-P", "-c", f"{imports}\n{code}"], environment).strip()


@pytest.mark.parametrize("text", SHELL_BLOCKS, ids=[t.split("\n")[0][:30] for t in SHELL_BLOCKS])
def test_the_commands_of_the_quick_start_run(
    gateway: Any, environment: dict[str, str], text: str
) -> None:
    if "curl" in text and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    assert urlsplit(gateway.url).hostname == "127.0.0.1"
    text = text.replace(DOCUMENTED_GATEWAY, gateway.url)
    assert run(["bash", "-euo", "pipefail", "-c", text], environment)


def test_the_quick_start_has_commands_that_run() -> None:
    assert len(SHELL_BLOCKS) >= 5
    assert any("curl" in text for text in SHELL_BLOCKS)
