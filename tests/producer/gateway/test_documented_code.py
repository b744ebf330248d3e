"""The code of the pages for newcomers runs as it stands, against a worker that is a stand-in."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis.asyncio

from inferq import AsyncClient, JobCancelled, SamplingParams
from inferq.protocol.keys import QueueKeys
from inferq.protocol.scripts import QueueScripts

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
#: How a worker claims that is about to be killed.
CLAIM: dict[str, Any] = {
    "free_tokens": 10**6,
    "idle": True,
    "max_jobs": 1,
    "max_model_len": 1000,
    "block_size": 16,
    "lease_ms": 60_000,
    "max_crashes": 1,
    "retention_ms": 60_000,
}


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


def _command_of_the_readme(start: str) -> str:
    """Return the command that begins so, as the README has it."""
    found = re.findall(r"inferq [^`#\n]+", (DOCS.parent / "README.md").read_text())
    return next(command.strip() for command in found if command.startswith(f"inferq {start}"))


async def test_who_has_read_the_readme_alone_finds_the_way(
    start_stand_in: Any, valkey_client: redis.asyncio.Redis, queue: str, environment: dict[str, str]
) -> None:
    """A first answer, a resumed stream, a cancelled job, a dead letter, a worker's blocks."""

    async def follow(start: str, job_id: str = "") -> str:
        command = re.sub(r"\bID\b", job_id, _command_of_the_readme(start))
        return await asyncio.to_thread(run, ["bash", "-c", command], environment)

    scripts = QueueScripts(valkey_client, QueueKeys(queue))
    async with AsyncClient(environment["INFERQ_REDIS_URL"], queue) as client:
        await client.submit("poison")
        async with asyncio.timeout(30):
            while not await scripts.dead_letters():
                await scripts.claim("killed", **CLAIM)
                await scripts.reconcile("killed", [], crashed=True)
        worker = start_stand_in()
        assert "The quick brown fox" in await follow("submit")
        job = await client.submit("x", SamplingParams(max_tokens=16))
        whole = (await job.result(timeout_s=60)).text
        assert whole.endswith((await follow("result ID --from-offset 12", job.id)).rstrip("\n"))
        worker.slow_down(0.05)
        endless = await client.submit("x", SamplingParams(max_tokens=4000, ignore_eos=True))
        assert (await follow("cancel ID", endless.id)).strip() in ("cancelled", "requested")
        with pytest.raises(JobCancelled):
            await endless.result(timeout_s=60)
    assert "crashed" in await follow("dead list")
    assert re.search(r"\d+/100000 ", await follow("workers"))
    assert "dead letters: 1" in await follow("queue")
