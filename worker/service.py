"""One worker process: joins the queue side and the engine, from start to drained end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from inferq.protocol.errors import QueueFull, ServerLost
from inferq.protocol.keys import QueueKeys
from inferq.protocol.replies import ClaimedJob
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.servers import ServerUrl
from inferq.protocol.task_ends import end_tasks
from inferq.runtime.health import HealthServer
from inferq.runtime.metrics import MetricsPage
from inferq.runtime.tracing import start_tracing
from inferq.version import __version__
from inferq.worker.daemon_executor import DaemonExecutor
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.insight.books import WorkerBooks
from inferq.worker.insight.metrics import WorkerMetrics
from inferq.worker.insight.probes import WorkerProbes
from inferq.worker.insight.reports import Reporter
from inferq.worker.insight.snapshots import Snapshots
from inferq.worker.jobs.dispatch import Dispatcher
from inferq.worker.jobs.job_lines import JobLines
from inferq.worker.jobs.job_trace import JobTraces
from inferq.worker.jobs.preparation import Preparer
from inferq.worker.model.loading.hub import find_model_folder
from inferq.worker.model.loading.model_store import resolve_model
from inferq.worker.pipe.engine_client import EngineClient, EngineInfo
from inferq.worker.queue.claimer import Claimer, ClaimLimits
from inferq.worker.queue.lease import LeaseKeeper
from inferq.worker.queue.publisher import Publisher
from inferq.worker.queue.running import RunningJob, RunningJobs
from inferq.worker.queue.script_connection import ScriptConnection
from inferq.worker.settings import EngineSettings, WorkerSettings
from inferq.worker.tasks import PartEnded, Parts

if TYPE_CHECKING:
    from inferq.runtime.spans import Tracing

logger = structlog.get_logger("inferq.worker")

#: Seconds that the claim under way may take to end before it is cut off.
CLAIM_END_S: Final = 2.0
#: Seconds that publishing and handing over may take at the end of a drain.
HAND_OVER_S: Final = 5.0
#: Seconds until a drain tries again to hand back what has not started.
HAND_BACK_AGAIN_S: Final = 0.5


class WorkerService:
    """Serves one queue partition with one engine until a signal, or the engine's end, stops it."""

    def __init__(self, settings: WorkerSettings, engine: EngineClient | None = None) -> None:
        self._settings = settings
        self._engine = engine or EngineClient()
        self._keys = QueueKeys(settings.queue, settings.partition)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        #: Fetching a model takes minutes; a worker that is to end meanwhile ends.
        self._threads = DaemonExecutor(1, "start")
        self._probes = WorkerProbes(
            self._engine, self._stop, step_timeout_s=settings.step_timeout_s
        )
        self._books = WorkerBooks()
        self._metrics = WorkerMetrics(
            self._engine,
            self._probes,
            self._books,
            queue=settings.queue,
            model_name=settings.model_name,
        )

    async def run(self) -> int:
        """Serve until stopped.

        Returns 0 when drained, 1 when the engine or a part of the worker failed. Raises
        `ServerLost` if Redis cannot be reached at the start, `ModelError` for a model that cannot
        be served.
        """
        settings = self._settings
        tracing = start_tracing(
            "inferq-worker", settings.tracing_endpoint, instance=settings.worker_name
        )
        client = connect(settings.redis_url.get_secret_value(), self._keys)
        calls = ScriptConnection(client)
        scripts = QueueScripts(calls, self._keys)
        try:
            await scripts.load()  # says now whether Redis is there and lets us in
            async with self._health():
                return await self._serve(client, scripts, tracing)
        finally:
            await self._engine.stop()
            self._threads.shutdown(wait=False, cancel_futures=True)
            await calls.disconnect()
            await client.aclose()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    async def _serve(self, client: Redis, scripts: QueueScripts, tracing: Tracing | None) -> int:
        with self._signals():
            starting = asyncio.create_task(self._start_engine(self._engine))
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await end_tasks([starting])
                return 0
            stopping.cancel()
            info, tokenizer = starting.result()
            session = WorkerSession(
                self._settings,
                self._keys,
                client,
                scripts,
                self._engine,
                info,
                tokenizer,
                self._books,
                tracing,
            )
            self._probes.loaded(lambda: session.is_connected)
            self._metrics.loaded(session.jobs)
            return await session.serve(self._stop, self._hurry)

    @contextlib.asynccontextmanager
    async def _health(self) -> AsyncIterator[None]:
        """Answer probes and tell metrics while this is entered, if the settings say so."""
        settings = self._settings
        if not settings.health_port:
            yield
            return
        page = MetricsPage(__version__, self._metrics.collect)
        async with HealthServer(
            self._probes.checks,
            port=settings.health_port,
            host=settings.health_host,
            pages={"/metrics": page.answer},
        ):
            yield

    async def _start_engine(self, engine: EngineClient) -> tuple[EngineInfo, Tokenizer]:
        settings = self._settings
        started_at = time.monotonic()
        in_thread = asyncio.get_running_loop().run_in_executor
        folder = await in_thread(
            self._threads, find_model_folder, resolve_model(settings.model), settings.revision
        )
        options = {name: getattr(settings, name) for name in EngineSettings.model_fields}
        options |= {"model": str(folder), "revision": None}
        options |= {"log_level": settings.log_level, "log_format": settings.log_format}
        info, tokenizer = await asyncio.gather(
            engine.start(options),
            in_thread(self._threads, Tokenizer.load, folder, settings.generation_config),
        )
        logger.info(
            "engine ready",
            model=settings.model_name,
            seconds=round(time.monotonic() - started_at, 1),
            blocks=info.num_blocks,
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        return info, tokenizer

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def on_signal(name: str) -> None:
            if self._stop.is_set():
                self._hurry.set()
            logger.info("signal received, draining", signal=name, at_once=self._hurry.is_set())
            self._stop.set()

        signals = (signal.SIGTERM, signal.SIGINT)
        for signum in signals:
            loop.add_signal_handler(signum, on_signal, signum.name)
        try:
            yield
        finally:
            for signum in signals:
                loop.remove_signal_handler(signum)


class WorkerSession:
    """The parts of a worker whose engine is loaded, wired together."""

    def __init__(
        self,
        settings: WorkerSettings,
        keys: QueueKeys,
        client: Redis,
        scripts: QueueScripts,
        engine: EngineClient,
        info: EngineInfo,
        tokenizer: Tokenizer,
        books: WorkerBooks | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        books = books or WorkerBooks()
        self._settings = settings
        self._scripts = scripts
        self._engine = engine
        self._info = info
        self._room = asyncio.Event()
        self._parts = Parts()
        worker = settings.worker_name
        self._jobs = jobs = RunningJobs(info.pool_tokens, info.block_size, settings.max_jobs)
        self._dispatcher = dispatcher = Dispatcher(
            worker=worker,
            retention_ms=round(settings.retention_s * 1000),
            scripts=scripts,
            preparer=Preparer(
                client,
                keys,
                tokenizer,
                info,
                model_name=settings.model_name,
                adapters=tuple(settings.lora_adapters or ()),
            ),
            tokenizer=tokenizer,
            engine=engine,
            jobs=jobs,
            books=books.jobs,
            traces=JobTraces(tracing, queue=settings.queue, model=settings.model_name),
            lines=JobLines(log_prompts=settings.log_prompts),
            on_room=self._on_room,
        )
        # Calls that may be long have connections of their own: no heartbeat waits behind one.
        self._publishing, self._claiming = ScriptConnection(client), ScriptConnection(client)
        self._publisher = Publisher(
            QueueScripts(self._publishing, keys),
            worker,
            jobs,
            lease_s=settings.lease_s,
            retention_s=settings.retention_s,
            on_published=dispatcher.published,
            on_lost=dispatcher.lose,
            on_cancel=dispatcher.cancel,
            books=books.publishing,
        )
        dispatcher.connect(self._publisher)
        self._claimer = Claimer(
            client,
            QueueScripts(self._claiming, keys),
            keys,
            worker,
            jobs,
            ClaimLimits(
                max_model_len=info.max_model_len,
                block_size=info.block_size,
                lease_ms=round(settings.lease_s * 1000),
                max_crashes=settings.max_crashes,
                retention_ms=round(settings.retention_s * 1000),
                starve_ms=round(settings.starve_s * 1000),
            ),
            on_claimed=self._take,
        )
        self._leases = LeaseKeeper(
            scripts,
            worker,
            jobs,
            lease_s=settings.lease_s,
            retention_s=settings.retention_s,
            is_stuck=lambda: engine.stalled_s > settings.step_timeout_s,
            on_lost=dispatcher.lose,
            on_cancel=dispatcher.cancel,
            on_deadline=dispatcher.expire,
            books=books.publishing,
        )
        self._snapshots = Snapshots(client, keys, worker, engine)
        self._reporter = Reporter(settings, scripts, engine, info, self._snapshots, books.jobs)
        engine.on_outputs = dispatcher.receive
        engine.on_events = dispatcher.follow

    @property
    def jobs(self) -> RunningJobs:
        """The jobs that the worker holds."""
        return self._jobs

    @property
    def is_connected(self) -> bool:
        """Whether the last claim and the last report succeeded."""
        return self._claimer.is_connected and self._reporter.is_connected

    async def serve(self, stop: asyncio.Event, hurry: asyncio.Event) -> int:
        """Work until `stop`, the engine's end, or a fault of our own; then drain.

        Returns 0 when all jobs ended or were handed over in order, else 1.
        """
        parts = self._parts
        parts.start("claimer", self._claimer.run())
        parts.start("dispatcher", self._dispatcher.run())
        parts.start("publisher", self._publisher.run())
        parts.start("leases", self._leases.run())
        parts.start("reporter", self._reporter.run(stop))
        parts.start("snapshots", self._snapshots.run())
        parts.start("watchdog", self._watch())
        logger.info("serving", queue=self._settings.queue, partition=self._settings.partition)
        try:
            await parts.beside(stop.wait())
            await self._end_claims()
            return 0 if await parts.beside(self._drain(hurry)) else 1
        except PartEnded as ended:
            logger.error("part ended", part=ended.part, fault=ended.fault)
            await self._end_claims()
            await self._give_up()
            return 1
        finally:
            await parts.cancel()
            await self._dispatcher.close()
            await self._publishing.disconnect()
            await self._claiming.disconnect()

    def _on_room(self) -> None:
        self._room.set()
        self._claimer.room_changed()

    def _take(self, claimed: ClaimedJob, sent_at: float) -> None:
        self._dispatcher.take(claimed, sent_at=sent_at, lease_s=self._settings.lease_s)

    async def _end_claims(self) -> None:
        """Have no more claims before the hand-back: it would claim its own jobs again."""
        self._claimer.stop()
        await self._parts.ended("claimer", timeout_s=CLAIM_END_S)

    async def _drain(self, hurry: asyncio.Event) -> bool:
        """Hand back the unstarted, finish what ends in time, hand over the rest.

        Return whether every job was handed over or finished. Takes the drain time-out, and the
        hand-over's at most.
        """
        deadline = time.monotonic() + self._settings.drain_timeout_s
        unstarted = [job for job in self._jobs if not job.has_started and not job.is_finished]
        logger.info("draining", running=len(self._jobs), handing_back=len(unstarted))
        if await self._hand_back(unstarted):
            unstarted = []
        await self._finish_jobs(max(0.0, deadline - time.monotonic()), hurry, unstarted)
        return await self._hand_over(are_published=True)

    async def _hand_back(self, jobs: Sequence[RunningJob]) -> bool:
        """Give jobs back that have not started; return whether that worked."""
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._dispatcher.hand_back(jobs)
        except (ServerLost, QueueFull, TimeoutError) as error:
            logger.warning("unstarted jobs not handed back yet", error=_reason(error))
            return False
        return True

    async def _finish_jobs(
        self, timeout_s: float, hurry: asyncio.Event, unreturned: Sequence[RunningJob]
    ) -> None:
        """Wait until no job is left, the time is over, or `hurry` is set.

        Nobody works on the `unreturned` any more: they are still to be handed back.
        """

        async def all_ended() -> None:
            is_back = not unreturned
            while not is_back:
                await asyncio.sleep(HAND_BACK_AGAIN_S)
                is_back = await self._hand_back(unreturned)
            while len(self._jobs):
                self._room.clear()
                await self._room.wait()

        waits = [asyncio.create_task(all_ended()), asyncio.create_task(hurry.wait())]
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(waits)
        for wait in done:
            wait.result()

    async def _give_up(self) -> None:
        """Have the jobs go on elsewhere after a fault."""
        # Whatever broke, nobody may renew leases for it, or wait for a part that is gone.
        await self._parts.cancel(but="reporter")
        await self._dispatcher.close()
        if self._engine.is_dead:
            await self._leave_to_others()
            logger.error("engine ended", why=await self._engine.cause_of_death())
        else:
            await self._hand_over(are_published=False)

    async def _hand_over(self, *, are_published: bool) -> bool:
        """Give all jobs back and take the worker out of the books; return whether that worked."""
        try:
            async with asyncio.timeout(HAND_OVER_S):
                await self._dispatcher.hand_back(list(self._jobs), flush=are_published)
                await self._sign_off()
        except (ServerLost, QueueFull, TimeoutError) as error:
            # The leases run out by themselves; others take over then.
            self._dispatcher.end_traces("left")
            logger.warning("hand-over incomplete", left=len(self._jobs), error=_reason(error))
            return False
        return True

    async def _leave_to_others(self) -> None:
        """Let others take the jobs of an engine that died at once, and count the crash."""
        self._dispatcher.end_traces("engine ended")
        try:
            async with asyncio.timeout(HAND_OVER_S):
                worker = self._settings.worker_name
                left = await self._scripts.reconcile(worker, (), crashed=True)
                logger.warning("jobs left to other workers", jobs=left)
                await self._sign_off()
        except (ServerLost, QueueFull, TimeoutError) as error:
            logger.warning("jobs not left yet, their leases run out", error=_reason(error))

    async def _sign_off(self) -> None:
        """Take the worker out of the books, once no report is under way that brought it back."""
        self._reporter.end()
        await self._parts.ended("reporter")
        await self._scripts.unregister(self._settings.worker_name)

    async def _watch(self) -> None:
        """End when the engine does; end the engine when one step takes longer than it may."""
        limit = self._settings.step_timeout_s
        while not self._engine.is_dead:
            await self._engine.wait_dead(timeout_s=min(1.0, limit / 4))
            if self._engine.stalled_s > limit:
                logger.error("engine step exceeds its limit", limit_s=limit)
                self._engine.kill()


def connect(url: str, keys: QueueKeys) -> Redis:
    """Return a client whose calls end within seconds, whatever the server does."""
    # No retries inside: a claim repeated there would hide the lost reply of the first.
    return ServerUrl.parse(url).client(
        keys.prefix,
        socket_connect_timeout=4.0,
        socket_timeout=5.0,
        retry=Retry(NoBackoff(), 0),
    )


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__  # a time-out has no words of its own
