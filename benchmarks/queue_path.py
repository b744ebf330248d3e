"""Workloads through the queue: a Valkey, a worker as its users start it, and the SDK's client."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from load_meter import CpuMeter, children
from workloads import Request

from inferq.embedded import EmbeddedServer
from inferq.producer.async_client import AsyncClient
from inferq.protocol.params import SamplingParams

#: Seconds that a worker may take to load its model.
READY_TIMEOUT_S = 120.0
QUEUE = "benchmark"


class QueuePath:
    """A context manager: starts server and worker, and ends both.

    `options` are settings of the worker by name. `command` starts another worker than inferq's.
    """

    name = "queue"

    def __init__(
        self, options: dict[str, Any], *, url: str | None = None, command: list[str] | None = None
    ) -> None:
        self._server = None if url else EmbeddedServer()
        self._url = url
        self._command = command or [sys.executable, "-m", "inferq", "worker"]
        self._options = {"queue": QUEUE, "log_level": "warning", **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._runner = asyncio.Runner()
        self._client: AsyncClient | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="inferq-bench-")

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def cpu(self) -> CpuMeter:
        """Return a new meter of the server, the worker's two processes and this one."""
        assert self._process is not None
        [engine] = children(self._process.pid)
        pids = {"worker_io": self._process.pid, "engine": engine, "client": os.getpid()}
        if self._server is not None:
            pids["server"] = self._runner.run(self._server_pid())
        return CpuMeter(pids)

    def run(self, requests: list[Request], arrivals: list[float], salt: str) -> list[list[float]]:
        """See `OfflinePath.run`; the times are those at which the client had the tokens."""
        return [times for _, times in self.follow(requests, arrivals, salt)]

    def follow(
        self, requests: list[Request], arrivals: list[float], salt: str
    ) -> list[tuple[str, list[float]]]:
        """Do as `run`, and return each job's id as well."""
        return self._runner.run(self._run(requests, arrivals, salt))

    def close(self) -> None:
        """End everything."""
        if self._client is not None:
            self._runner.run(self._client.aclose())
        self._runner.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
        if self._server is not None:
            self._server.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        if self._server is not None:
            self._url = self._server.start().url
        options = {"redis_url": self._url, **self._options}
        arguments = [
            part
            for name, value in options.items()
            for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]
        self._log = Path(self._folder.name) / "worker.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*self._command, *arguments], stderr=log, cwd=self._folder.name
            )
        self._runner.run(self._wait_ready())

    async def _wait_ready(self) -> None:
        assert self._process is not None
        self._client = AsyncClient(self._url, QUEUE)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not await self._client.workers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the worker did not start: {self._log.read_text()}")
            await asyncio.sleep(0.05)

    async def _server_pid(self) -> int:
        import redis.asyncio

        assert self._url is not None
        async with redis.asyncio.Redis.from_url(self._url) as client:
            return int((await client.info("server"))["process_id"])

    async def _run(
        self, requests: list[Request], arrivals: list[float], salt: str
    ) -> list[tuple[str, list[float]]]:
        following = asyncio.gather(
            *(
                self._follow(request, arrival, salt)
                for request, arrival in zip(requests, arrivals, strict=True)
            )
        )
        watching = asyncio.create_task(self._watch())
        await asyncio.wait({following, watching}, return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if not following.done():
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            raise RuntimeError(f"the worker ended: {self._log.read_text()}")
        return following.result()

    async def _watch(self) -> None:
        """Return when the worker has ended."""
        assert self._process is not None
        while self._process.poll() is None:  # noqa: ASYNC110 - a process sets no event
            await asyncio.sleep(0.5)

    async def _follow(self, request: Request, arrival: float, salt: str) -> tuple[str, list[float]]:
        assert self._client is not None
        if (wait := arrival - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        params = SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True)
        job = await self._client.submit(request.prompt, params, cache_salt=salt or None)
        times: list[float] = []
        async for event in job.stream():
            times += [time.perf_counter()] * len(event.token_ids)
        return job.id, times
