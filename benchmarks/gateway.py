"""Many streams through one gateway process, before workers whose engines are stand-ins.

python benchmarks/gateway.py [--streams 1000] [--tokens 30] [--step-ms 1000] [--workers 4]

The workers begin to generate when they have all jobs, so that all streams are open at once. Some
streams are also read with the SDK, straight from the server: how much later each token comes
through the gateway is what it adds. Prints one JSON line. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis.asyncio
from figures import percentile, print_line
from http_stream import HttpStream, is_healthy
from load_meter import CpuMeter, LoadMeter
from simulated_workers import SimulatedWorker, make_worker
from stand_in import write_tokenizer

from inferq.embedded import EmbeddedServer
from inferq.producer.async_client import AsyncClient
from inferq.protocol.keys import QueueKeys
from inferq.runtime.logs import configure_logging
from inferq.worker.engine.text.tokenizer import Tokenizer

QUEUE = "gateway-benchmark"
#: The gateway's user on the server: its connections are told from others by it.
USER, PASSWORD = "gateway", "benchmark"
READY_TIMEOUT_S = 120.0
#: Tell the workers' process to generate no more, and to generate again.
HOLD, RELEASE = signal.SIGUSR1, signal.SIGUSR2
#: Streams that begin together.
BEGIN_AT_ONCE = 50
#: Seconds between two looks at the gateway's connections.
LOOK_S = 0.5


def main() -> None:
    """Run the benchmark, or the process of its workers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=30, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=1000.0, help="between two tokens")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--direct", type=int, default=50, help="streams that the SDK reads too")
    parser.add_argument("--profile", type=Path, help="write the gateway's cProfile there")
    parser.add_argument("--workers-of", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.workers_of is not None:
        asyncio.run(_serve(given))
        return
    with EmbeddedServer() as server, _workers(server.url, given) as workers:
        print_line(asyncio.run(_measure(server, workers, given)))


async def _measure(
    server: EmbeddedServer, workers: subprocess.Popen[bytes], given: argparse.Namespace
) -> dict[str, Any]:
    port = _free_port()
    async with (
        redis.asyncio.Redis.from_url(server.url) as control,
        AsyncClient(server.url, QUEUE) as sdk,
    ):
        await control.acl_setuser(
            USER,
            enabled=True,
            passwords=[f"+{PASSWORD}"],
            keys="*",
            channels="*",
            commands=["+@all"],
        )
        with _gateway(server, port, given.profile) as gateway:
            await _until_healthy(port, gateway)
            await HttpStream(
                port, 2
            ).follow()  # what is made at the first request is not per stream
            workers.send_signal(HOLD)
            _forget_peak(gateway.pid)
            before = _memory_mib(gateway.pid, "VmRSS")
            cpu, meter = CpuMeter({"gateway": gateway.pid}), LoadMeter.start()
            streams = [HttpStream(port, given.tokens) for _ in range(given.streams)]
            looking = asyncio.create_task(_most_connections(control))
            direct = await _run(streams, sdk, given.direct, workers)
            looking.cancel()
            figures = meter.figures() | {"gateway_cpu_s": cpu.seconds()["gateway"]}
            figures |= {"rss_before_mib": before, "rss_peak_mib": _memory_mib(gateway.pid, "VmHWM")}
            figures["redis_connections"] = await looking
    return _figures(given, streams, direct, figures)


async def _run(
    streams: Sequence[HttpStream], sdk: AsyncClient, direct: int, workers: subprocess.Popen[bytes]
) -> list[tuple[HttpStream, list[float]]]:
    """Follow all streams; return some of them with the times at which the SDK had their tokens."""
    watched = list(streams[:: max(1, len(streams) // direct)])[:direct]
    async with asyncio.TaskGroup() as group:
        times = [group.create_task(_read_directly(stream, sdk)) for stream in watched]
        for start in range(0, len(streams), BEGIN_AT_ONCE):
            few = streams[start : start + BEGIN_AT_ONCE]
            for stream in few:
                group.create_task(stream.follow())
            await _until_claimed(sdk, start + len(few))
        workers.send_signal(RELEASE)
    return [(stream, task.result()) for stream, task in zip(watched, times, strict=True)]


async def _read_directly(stream: HttpStream, sdk: AsyncClient) -> list[float]:
    times: list[float] = []
    await stream.has_begun.wait()
    async for event in sdk.stream(stream.job_id):
        times += [time.monotonic()] * (event.next_offset - len(times))
    return times


def _figures(
    given: argparse.Namespace,
    streams: Sequence[HttpStream],
    direct: Sequence[tuple[HttpStream, list[float]]],
    measured: dict[str, Any],
) -> dict[str, Any]:
    all_open_at = max(stream.times[0] for stream in streams if stream.times)
    first_end_at = min(stream.times[-1] for stream in streams if stream.times)
    added = [
        1e3 * (by_http - by_sdk)
        for stream, times in direct
        for by_http, by_sdk in zip(stream.times, times, strict=False)
        if all_open_at < by_sdk < first_end_at
    ]
    if not added:
        raise RuntimeError("the streams were not open at once")
    tokens = sum(len(stream.times) for stream in streams)
    seconds = max(stream.times[-1] for stream in streams) - min(s.times[0] for s in streams)
    grown = measured["rss_peak_mib"] - measured["rss_before_mib"]
    return {
        "measurement": "gateway",
        "streams": given.streams,
        "workers": given.workers,
        "step_ms": given.step_ms,
        "complete": sum(stream.is_complete for stream in streams),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "all_open_s": first_end_at - all_open_at,
        "pairs": len(added),
        "added_p50_ms": percentile(added, 0.5),
        "added_p99_ms": percentile(added, 0.99),
        "gateway_us_per_token": 1e6 * measured.pop("gateway_cpu_s") / tokens,
        "kib_per_stream": 1024 * grown / given.streams,
        **measured,
    }


async def _most_connections(control: redis.asyncio.Redis) -> int:
    """Count the gateway's connections until cancelled; return the highest count."""
    most = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            clients = await control.client_list()
            most = max(most, sum(client["user"] == USER for client in clients))
            await asyncio.sleep(LOOK_S)
    return most


@contextlib.contextmanager
def _gateway(
    server: EmbeddedServer, port: int, profile: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    url = f"redis://{USER}:{PASSWORD}@127.0.0.1:{server.port}/0"
    tool = ["-m", "cProfile", "-o", str(profile)] if profile is not None else []
    process = subprocess.Popen(
        [sys.executable, *tool, "-m", "inferq", "gateway", "--port", str(port), "--queues", QUEUE],
        env={**os.environ, "INFERQ_REDIS_URL": url, "INFERQ_LOG_LEVEL": "warning"},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@contextlib.contextmanager
def _workers(url: str, given: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["--streams", str(given.streams), "--step-ms", str(given.step_ms)]
    flags += ["--workers", str(given.workers), "--workers-of", url]
    process = subprocess.Popen([sys.executable, __file__, *flags])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def _serve(given: argparse.Namespace) -> None:
    """Run the I/O sides of the workers until SIGTERM."""
    configure_logging("warning", "json")
    keys, step_s = QueueKeys(QUEUE), given.step_ms / 1000
    with tempfile.TemporaryDirectory(prefix="inferq-bench-") as folder:
        write_tokenizer(Path(folder))
        tokenizer = Tokenizer.load(folder)
    streams = -(-given.streams // given.workers) + 1
    made = [
        make_worker(f"w{w}", given.workers_of, keys, tokenizer, streams=streams, step_s=step_s)
        for w in range(given.workers)
    ]
    held, released, stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number, event in {HOLD: held, RELEASE: released, signal.SIGTERM: stop}.items():
        loop.add_signal_handler(number, event.set)
    serving = [worker.session.serve(stop, stop) for worker in made]
    # workers of their own do not step together
    phases = [step_s * number / len(made) for number in range(len(made))]
    generating = [
        asyncio.create_task(_generate(worker, phase_s, held, released, stop))
        for worker, phase_s in zip(made, phases, strict=True)
    ]
    await asyncio.gather(*serving)
    for task in generating:
        task.cancel()
    for worker in made:
        await worker.connection.disconnect()


async def _generate(
    worker: SimulatedWorker,
    phase_s: float,
    held: asyncio.Event,
    released: asyncio.Event,
    stop: asyncio.Event,
) -> None:
    await worker.generator.run(held)
    await released.wait()
    await asyncio.sleep(phase_s)
    await worker.generator.run(stop)


async def _until_healthy(port: int, gateway: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not await asyncio.to_thread(is_healthy, port):
        if gateway.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the gateway or the workers did not start")
        await asyncio.sleep(0.1)


async def _until_claimed(sdk: AsyncClient, count: int) -> None:
    """Wait until the workers have so many jobs."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while (await sdk.queue_length()).running < count:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _memory_mib(pid: int, name: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no {name}")


if __name__ == "__main__":
    main()
