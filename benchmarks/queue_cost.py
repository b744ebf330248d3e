"""What the queue costs, without a model: one JSON line per measurement.

python benchmarks/queue_cost.py [--redis URL] [--quick] [--only NAME,…]

server   tokens per second that one server carries, sent as prepared bytes: the server's own limit
workers  the real I/O side of many workers on one core: CPU per token, and which side is saturated
latency  a worker's two processes around an engine of fixed step time, and the SDK's reader: time to
         first token and inter-token delay, against the engine's own
claims   microseconds of enqueue and claim as the queue grows, claims per second at its full length
memory   bytes of a queued, a running and a finished job

With `--redis` the server's CPU is known only if it runs on this machine. (Not called `queue.py`:
that would stand in the way of Python's own module for every script of this folder.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from figures import percentile, print_line
from load_meter import LoadMeter, cpu_seconds
from queue_path import QueuePath
from raw_commands import RawCommands, jobs_of
from simulated_workers import endless_params, make_worker
from stand_in import write_tokenizer
from workloads import Request

from inferq.embedded import EmbeddedServer
from inferq.producer.async_client import AsyncClient
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import Event, FinishReason, Terminal
from inferq.protocol.replies import PublishItem
from inferq.runtime.logs import configure_logging
from inferq.worker.engine.text.tokenizer import Tokenizer

#: A core that is busy for this share of the time is saturated.
SATURATED = 0.9
#: Tokens that are sent to the server before its replies are awaited.
ROUNDS_OF = 8192


@dataclass(frozen=True, slots=True)
class Server:
    """The server under test."""

    url: str
    client: redis.Redis
    #: None if it runs elsewhere.
    pid: int | None

    @classmethod
    def at(cls, url: str) -> Server:
        """Look the server up."""
        client = redis.Redis.from_url(url)
        pid = int(client.info("server")["process_id"])
        name = Path(f"/proc/{pid}/comm")
        is_here = name.exists() and any(kind in name.read_text() for kind in ("redis", "valkey"))
        return cls(url, client, pid if is_here else None)

    def cpu_s(self) -> float:
        """CPU seconds so far; 0 if they cannot be known."""
        return cpu_seconds(self.pid) if self.pid else 0.0

    def used_memory(self) -> int:
        """Bytes that the server's data take."""
        return int(self.client.info("memory")["used_memory_dataset"])

    def forget(self, keys: QueueKeys) -> None:
        """Remove all keys of a queue."""
        found = list(self.client.scan_iter(f"{keys.prefix}*", count=10_000))
        for start in range(0, len(found), 10_000):
            self.client.unlink(*found[start : start + 10_000])


def server_limit(server: Server, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Publish one token of every stream, round after round, with and without readers."""
    shapes = [(1, 32), (4, 256)] if quick else [(1, 32), (1, 256), (4, 256), (16, 256), (64, 256)]
    for workers, streams in shapes:
        for is_read in (False, True):
            keys = QueueKeys(f"limit-{workers}-{streams}-{int(is_read)}")
            with RawCommands(server.url, keys) as raw:
                yield _server_limit(server, raw, workers, streams, 1.0 if quick else 2.0, is_read)
            server.forget(keys)


def _server_limit(
    server: Server, raw: RawCommands, workers: int, streams: int, seconds: float, is_read: bool
) -> dict[str, Any]:
    jobs = jobs_of(workers * streams)
    raw.send(raw.enqueue(*job) for job in jobs)
    raw.send([raw.claim(str(w), streams) for w in range(workers)])
    ids = [job_id for job_id, _ in jobs]
    shares = [ids[w * streams : (w + 1) * streams] for w in range(workers)]
    meter, cpu, own = LoadMeter.start(), server.cpu_s(), time.process_time()
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        commands: list[bytes] = []
        for _ in range(max(1, ROUNDS_OF // len(ids))):  # many at once, so that the server is busy
            commands += [raw.publish_tokens(str(w), of, rounds) for w, of in enumerate(shares)]
            if is_read:
                commands += [raw.read(of, rounds) for of in shares]
            rounds += 1
        raw.send(commands)
    wall = time.perf_counter() - start
    tokens = rounds * len(ids)
    used = server.cpu_s() - cpu
    published = server.client.xlen(QueueKeys(raw.queue).out(ids[-1]))
    if published != rounds:
        raise RuntimeError(f"{published} of {rounds} tokens arrived")
    return {
        "measurement": "server",
        "workers": workers,
        "streams": streams,
        "readers": is_read,
        "tokens_per_s": tokens / wall,
        "server_us_per_token": 1e6 * used / tokens,
        "server_limit_tokens_per_s": tokens / used if used else 0.0,
        "server_core_share": used / wall,
        "client_core_share": (time.process_time() - own) / wall,
        **meter.figures(),
    }


def worker_cost(server: Server, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Run the I/O sides of many workers on this core, at some rates of tokens."""
    shapes = [(1, 32, 0.02), (4, 64, 0.04)]
    if not quick:
        shapes = [(1, 32, 0.02), (1, 256, 0.04), (4, 256, 0.05), (16, 64, 0.05), (64, 32, 0.1)]
    with tempfile.TemporaryDirectory(prefix="inferq-bench-") as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(folder)
    for workers, streams, step_s in shapes:
        keys = QueueKeys(f"workers-{workers}-{streams}")
        seconds = 1.5 if quick else 3.0
        yield asyncio.run(_worker_cost(server, keys, tokenizer, workers, streams, step_s, seconds))
        server.forget(keys)


async def _worker_cost(
    server: Server,
    keys: QueueKeys,
    tokenizer: Tokenizer,
    workers: int,
    streams: int,
    step_s: float,
    seconds: float,
) -> dict[str, Any]:
    made = [
        make_worker(f"w{w}", server.url, keys, tokenizer, streams=streams, step_s=step_s)
        for w in range(workers)
    ]
    stop, end = asyncio.Event(), asyncio.Event()
    serving = [asyncio.create_task(w.session.serve(stop, stop)) for w in made]
    count = workers * streams
    async with AsyncClient(server.url, keys.queue) as client:
        for start in range(0, count, 64):
            few = range(start, min(start + 64, count))
            await asyncio.gather(*(client.submit([5] * 32, endless_params()) for _ in few))
    async with asyncio.timeout(60):
        while sum(w.num_running for w in made) < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
    generating = [asyncio.create_task(w.generator.run(end)) for w in made]
    await asyncio.sleep(0.5)
    meter, cpu, own = LoadMeter.start(), server.cpu_s(), time.process_time()
    start_at, calls = time.perf_counter(), _calls(server)
    before, offered = _published(server, keys), sum(w.generator.num_tokens for w in made)
    await asyncio.sleep(seconds)
    wall = time.perf_counter() - start_at
    tokens = _published(server, keys) - before
    offered = sum(w.generator.num_tokens for w in made) - offered
    used, own = server.cpu_s() - cpu, time.process_time() - own
    calls = _calls(server) - calls
    end.set()
    stop.set()
    figures = meter.figures()
    await asyncio.gather(*serving, *generating)
    for worker in made:
        await worker.connection.disconnect()
    shares = {"server": used / wall, "client": own / wall}
    return {
        "measurement": "workers",
        "workers": workers,
        "streams": streams,
        "step_ms": 1e3 * step_s,
        "offered_tokens_per_s": offered / wall,
        "tokens_per_s": tokens / wall,
        "calls_per_s": calls / wall,
        "io_us_per_token": 1e6 * own / tokens,
        "server_us_per_token": 1e6 * used / tokens,
        "server_core_share": shares["server"],
        "client_core_share": shares["client"],
        "saturated": next((side for side, share in shares.items() if share > SATURATED), "neither"),
        **figures,
    }


def _calls(server: Server) -> int:
    return int(server.client.info("commandstats")["cmdstat_evalsha"]["calls"])


def _published(server: Server, keys: QueueKeys) -> int:
    """Return the tokens that all streams of a queue have."""
    pipeline = server.client.pipeline(transaction=False)
    for key in server.client.scan_iter(f"{keys.prefix}job:*", count=10_000):
        pipeline.hget(key, "offset")
    return sum(map(int, pipeline.execute()))


def latency(server: Server, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Follow streams through the whole path, with arrivals spread over a second."""
    shapes = [(32, 40)] if quick else [(1, 20), (32, 40), (256, 40)]
    for streams, step_ms in shapes:
        with tempfile.TemporaryDirectory(prefix="inferq-bench-") as name:
            yield _latency(server, Path(name), streams, step_ms, tokens=40 if quick else 80)


def _latency(
    server: Server, folder: Path, streams: int, step_ms: int, *, tokens: int
) -> dict[str, Any]:
    write_tokenizer(folder)
    trace = folder / "trace"
    command = [
        sys.executable,
        str(Path(__file__).with_name("stand_in.py")),
        "worker",
        str(step_ms),
        str(trace),
    ]
    with QueuePath({"model": folder}, url=server.url, command=command) as path:
        requests = [Request([7] * 32, tokens) for _ in range(streams)]
        path.run(requests[:1], [0.0], "warm-up")
        meter, cpu, server_cpu = LoadMeter.start(), path.cpu, server.cpu_s()
        start = time.perf_counter() + 0.01
        arrivals = [start + index / streams for index in range(streams)]
        seen = dict(path.follow(requests, arrivals, ""))
        used = cpu.seconds() | {"server": server.cpu_s() - server_cpu}
        figures = meter.figures()
    made = {job_id: times for job_id, *times in map(json.loads, trace.read_text().splitlines())}
    by_arrival = dict(zip(seen, arrivals, strict=True))
    added = [
        1e3 * ((times[0] - by_arrival[job_id]) - (made[job_id][1] - made[job_id][0]))
        for job_id, times in seen.items()
    ]
    gaps = {
        "itl": _gaps(seen.values()),
        "engine_itl": _gaps(made[job_id][1:] for job_id in seen),
    }
    count = sum(map(len, seen.values()))
    return {
        "measurement": "latency",
        "streams": streams,
        "step_ms": step_ms,
        "added_ttft_p50_ms": percentile(added, 0.5),
        "added_ttft_p99_ms": percentile(added, 0.99),
        **{
            f"{name}_p{round(100 * share)}_ms": percentile(of, share)
            for name, of in gaps.items()
            for share in (0.5, 0.99)
        },
        **{f"{process}_us_per_token": 1e6 * s / count for process, s in used.items()},
        **figures,
    }


def _gaps(streams: Iterable[Sequence[float]]) -> list[float]:
    """Return all delays between the tokens of streams, in milliseconds."""
    return [1e3 * (b - a) for times in streams for a, b in itertools.pairwise(times)]


def claims(server: Server, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure the scripts as the queue grows, then claim from its full length."""
    lengths = [1, 100, 10_000] if quick else [1, 100, 1_000, 10_000, 100_000]
    keys = QueueKeys("claims")
    jobs = jobs_of(lengths[-1] + 600)
    done = 0
    with RawCommands(server.url, keys) as raw:
        for length in lengths:
            while done < length:
                raw.send(raw.enqueue(*job) for job in jobs[done : min(done + 2_000, length)])
                done = min(done + 2_000, length)
            enqueue_us = _script_us(server, raw, [raw.enqueue(*j) for j in jobs[done : done + 100]])
            done += 100
            claim_us = _script_us(server, raw, [raw.claim("w", 1)] * 50)
            yield {
                "measurement": "script",
                "queued": length,
                "enqueue_us": enqueue_us,
                "claim_one_us": claim_us,
            }
        for most in (1, 16, 256):
            calls = max(1, min(200, 4096 // most))
            start, cpu = time.perf_counter(), server.cpu_s()
            for _ in range(calls):
                raw.send([raw.claim("w", most)])
            wall = time.perf_counter() - start
            yield {
                "measurement": "claims",
                "queued": done,
                "jobs_per_claim": most,
                "claims_per_s": calls / wall,
                "jobs_per_s": calls * most / wall,
                "server_us_per_job": 1e6 * (server.cpu_s() - cpu) / (calls * most),
            }
    server.forget(keys)


def _script_us(server: Server, raw: RawCommands, commands: list[bytes]) -> float:
    """Return the microseconds of one call: CPU time, or by the server's own clock if it is remote.

    CPU time includes reading the call and writing the reply, and nothing that others do meanwhile.
    """
    server.client.config_resetstat()
    cpu = server.cpu_s()
    raw.send(commands)
    used = server.cpu_s() - cpu
    stats = server.client.info("commandstats")["cmdstat_evalsha"]
    if stats["calls"] != len(commands) or stats["failed_calls"]:
        raise RuntimeError(f"{len(commands)} calls were sent, the server says {stats}")
    return 1e6 * used / len(commands) if server.pid else float(stats["usec_per_call"])


def memory(server: Server, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Take the difference that many jobs make, in each of their states."""
    count, tokens = (256 if quick else 1024), 128
    for per_event in (1, 4):
        keys = QueueKeys(f"memory-{per_event}")
        jobs = jobs_of(count)
        with RawCommands(server.url, keys) as raw:
            raw.send([raw.enqueue(*job) for job in jobs_of(1)])  # lanes and books are there
            empty = server.used_memory()
            raw.send(raw.enqueue(*job) for job in jobs)
            queued = server.used_memory()
            for _ in range(0, count + 1, 256):
                raw.send([raw.claim("w", 512)])
            running = server.used_memory()
            for start in range(0, count, 128):
                raw.send(_whole_output(raw, jobs[start : start + 128], tokens, per_event))
            finished = server.used_memory()
            out = server.client.memory_usage(keys.out(jobs[0][0]), samples=0)
        yield {
            "measurement": "memory",
            "prompt_tokens": 128,
            "queued_bytes": (queued - empty) / count,
            "running_bytes": (running - empty) / count,
            "finished_bytes": (finished - empty) / count,
            "output_tokens": tokens,
            "tokens_per_event": per_event,
            "stream_bytes": out,
        }
        server.forget(keys)


def _whole_output(
    raw: RawCommands, jobs: Sequence[tuple[str, bytes]], tokens: int, per_event: int
) -> Iterator[bytes]:
    """Yield the calls that publish all tokens of jobs, and their ends."""
    for first in range(0, tokens, per_event):
        is_last = first + per_event >= tokens
        ids = tuple(range(20_000 + first, 20_000 + first + per_event))
        end = Terminal(FinishReason.LENGTH) if is_last else None
        ends = tuple(range(5, 5 * per_event + 1, 5))
        text = " word" * per_event
        event = Event(offset=first, token_ids=ids, text=text, text_ends=ends, terminal=end)
        events = ((first + per_event, event.encode()),)
        reason = FinishReason.LENGTH if is_last else None
        yield raw.publish(
            "w", [PublishItem(job_id, 1, first, events, reason) for job_id, _ in jobs]
        )


MEASUREMENTS: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
    "server": server_limit,
    "workers": worker_cost,
    "latency": latency,
    "claims": claims,
    "memory": memory,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--redis", help="URL of a server to measure (default: an embedded Valkey)")
    parser.add_argument("--quick", action="store_true", help="some 20 seconds instead of 100")
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="which, with commas between")
    options = parser.parse_args(arguments)
    configure_logging("error", "json")
    embedded = None if options.redis else EmbeddedServer().start()
    try:
        server = Server.at(options.redis or embedded.url)  # type: ignore[union-attr]
        for name in options.only.split(","):
            for figures in MEASUREMENTS[name](server, quick=options.quick):
                print_line(figures)
    finally:
        if embedded is not None:
            embedded.stop()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
