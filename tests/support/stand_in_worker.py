"""A worker whose engine says what the test wants; all but the engine is the real thing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inferq.producer.gateway.server import GatewayServer
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts
from inferq.protocol.snapshots import BlockSnapshot
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.jobs.generation import num_streams
from inferq.worker.pipe.engine_client import EngineClient, EngineInfo
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.queue.script_connection import ScriptConnection
from inferq.worker.service import WorkerSession, connect
from inferq.worker.settings import WorkerSettings

#: Said again and again, until max_tokens, where the test says nothing else.
ENDLESS = "The quick brown fox jumps over the lazy dog. "
NUM_BLOCKS = 100_000
START_TIMEOUT_S = 60.0


@dataclass(slots=True)
class _Request:
    params: SamplingParams
    prompt: list[int]
    answer: list[int]
    is_endless: bool
    done: dict[int, int] = field(default_factory=dict)


class StandInEngine(EngineClient):
    """Brings one token to each output in each step of `step_s` seconds.

    Output i says the answer from its token 3·i on, so that outputs differ. An answer that the test
    gave ends with the end token; `answers` are taken by requests in their order, the last stays.
    Token probabilities: the token itself -0.5, the ids after it one less each.
    """

    def __init__(self, tokenizer: Tokenizer, *, step_s: float, max_model_len: int) -> None:
        super().__init__()
        self.step_s = step_s
        self.answers: list[str] = []
        self.requests: list[SamplingParams] = []
        self.aborted: list[str] = []
        #: What the blocks are said to hold.
        self.snapshot = BlockSnapshot(NUM_BLOCKS, 0, [NUM_BLOCKS, 0, 0, 0], [])
        self._tokenizer = tokenizer
        self._info = EngineInfo(NUM_BLOCKS, 16, max_model_len, tokenizer.vocab_size)
        self._running: dict[str, _Request] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, options: dict[str, Any]) -> EngineInfo:
        self._task = asyncio.create_task(self._run())
        return self._info

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        resumed: Sequence[tuple[Sequence[int], bool]] = (),
        priority: int = 0,
        cache_salt: str = "",
        adapter: str = "",
        traced: bool = False,
    ) -> None:
        is_endless = not self.answers
        text = ENDLESS if is_endless else self.answers[0]
        if len(self.answers) > 1:
            self.answers.pop(0)
        answer = self._tokenizer.encode(text, add_special_tokens=False)
        request = _Request(params, list(prompt_token_ids), answer, is_endless)
        for index in range(num_streams(params)):
            before, is_finished = resumed[index] if resumed else ((), False)
            if not is_finished:
                request.done[index] = len(before)
        self.requests.append(params)
        self._running[request_id] = request
        self._work.set()

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._running.pop(request_id, None)

    def abort_output(self, request_id: str, index: int) -> None:
        if request_id in self._running:
            self._running[request_id].done.pop(index, None)

    async def block_snapshot(self) -> tuple[float, bytes]:
        return 0.0, self.snapshot.encode()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def kill(self) -> None:
        raise AssertionError("nothing here may hang")

    async def _run(self) -> None:
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
            await asyncio.sleep(self.step_s)
            self.last_step_at = time.monotonic()
            outputs = []
            for request_id, request in list(self._running.items()):
                outputs += self._step(request_id, request)
                if not request.done:
                    self._running.pop(request_id, None)
            if outputs:
                self.on_outputs(outputs)

    def _step(self, request_id: str, request: _Request) -> list[EngineOutput]:
        outputs = []
        for index, done in list(request.done.items()):
            token_id, reason, stop_reason = self._next(request, index, done)
            request.done[index] = done + 1
            if reason is not None:
                del request.done[index]
            wants_prompt = request.params.prompt_logprobs is not None and not done and not index
            outputs.append(
                EngineOutput(
                    request_id,
                    index,
                    (token_id,),
                    logprobs=self._logprobs(token_id, request.params.logprobs),
                    cumulative_logprobs=(-0.5 * (done + 1) - index,),
                    finish_reason=reason,
                    stop_reason=stop_reason,
                    prompt_logprobs=self._prompt_logprobs(request) if wants_prompt else None,
                    request_finished=not request.done,
                )
            )
        return outputs

    def _next(
        self, request: _Request, index: int, done: int
    ) -> tuple[int, FinishReason | None, int | None]:
        params, answer = request.params, request.answer
        assert params.max_tokens is not None
        end = self._tokenizer.eos_token_id
        assert end is not None
        place = done + 3 * index if request.is_endless else done
        is_over = not request.is_endless and place >= len(answer)
        token_id = end if is_over else answer[place % len(answer)]
        if is_over and not params.ignore_eos:
            return token_id, FinishReason.STOP, None
        if token_id in params.stop_token_ids and done + 1 >= params.min_tokens:
            return token_id, FinishReason.STOP, token_id
        return token_id, FinishReason.LENGTH if done + 1 >= params.max_tokens else None, None

    def _logprobs(self, token_id: int, number: int | None) -> tuple[TokenLogprob, ...] | None:
        return None if number is None else (_logprob(token_id, number),)

    def _prompt_logprobs(self, request: _Request) -> tuple[TokenLogprob | None, ...]:
        number = request.params.prompt_logprobs
        assert number is not None
        return (None, *(_logprob(token_id, number) for token_id in request.prompt[1:]))


def _logprob(token_id: int, number: int) -> TokenLogprob:
    return TokenLogprob(-0.5, tuple((token_id + k, -0.5 - k) for k in range(number)))


class _LoopThread:
    """Runs `main` on a loop of its own thread until `stop`; `main` says when it is ready."""

    def __init__(self, main: Callable[[_LoopThread], Coroutine[Any, Any, None]]) -> None:
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.stopping: asyncio.Event
        self._thread = threading.Thread(target=lambda: self._run(main), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(START_TIMEOUT_S), "did not come up"
        if self._failure is not None:
            raise self._failure

    def ready(self) -> None:
        self._ready.set()

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop and return what it returns."""

        async def run() -> Any:
            return function()

        return self.run(run())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_TIMEOUT_S)

    def stop(self) -> None:
        if self._thread.is_alive() and self._loop is not None:
            self._loop.call_soon_threadsafe(self.stopping.set)
        self.join()

    def join(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._thread.join(START_TIMEOUT_S)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _run(self, main: Callable[[_LoopThread], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self.stopping = asyncio.Event()
            await main(self)

        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self._failure = error
        finally:
            self._ready.set()


class StandInWorker:
    """A worker of `queue` that names its model `model`; ends when the test does."""

    def __init__(
        self,
        url: str,
        queue: str,
        tokenizer: Tokenizer,
        *,
        model: str = "stand-in",
        name: str = "stand-in-worker",
        step_s: float = 0.002,
        max_model_len: int = 4096,
        adapters: dict[str, str] | None = None,
        drain_timeout_s: float = 0,
        lease_s: float = 20.0,
        tracing: Any = None,
    ) -> None:
        self._tracing = tracing
        self.url, self.queue, self.model = url, queue, model
        self.tokenizer = tokenizer
        self._settings = WorkerSettings(
            model=model,
            redis_url=url,  # type: ignore[arg-type]
            queue=queue,
            worker_name=name,
            lora_adapters=adapters,
            drain_timeout_s=drain_timeout_s,
            report_interval_s=0.2,
            max_jobs=4096,
            lease_s=lease_s,
        )
        self._options = {"step_s": step_s, "max_model_len": max_model_len}
        self._thread = _LoopThread(self._main)
        self.engine: StandInEngine

    def start(self) -> StandInWorker:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._thread.stop()

    def ask_to_drain(self) -> None:
        """Begin to end as SIGTERM does; does not wait."""
        self._thread.call(self._thread.stopping.set)

    def die(self) -> None:
        """End at once, as a worker that is killed: nothing is handed back or signed off."""
        self._thread.call(lambda: self._serving.cancel())
        self._thread.join()

    def say(self, *answers: str) -> None:
        """Answer the next requests so, the last answer again and again; nothing: endlessly."""
        self._thread.call(lambda: self.engine.answers.__setitem__(slice(None), answers))

    def slow_down(self, step_s: float) -> None:
        """Let each step take so many seconds."""
        self.engine.step_s = step_s

    @property
    def last_request(self) -> SamplingParams:
        """The parameters of the request that came last to the engine."""
        return self.engine.requests[-1]

    async def _main(self, thread: _LoopThread) -> None:
        settings, keys = self._settings, QueueKeys(self.queue)
        client = connect(self.url, keys)
        calls = ScriptConnection(client)
        scripts = QueueScripts(calls, keys)
        self.engine = StandInEngine(self.tokenizer, **self._options)  # type: ignore[arg-type]
        try:
            await scripts.load()
            info = await self.engine.start({})
            session = WorkerSession(
                settings,
                keys,
                client,
                scripts,
                self.engine,
                info,
                self.tokenizer,
                tracing=self._tracing,
            )
            self._serving = asyncio.create_task(session.serve(thread.stopping, asyncio.Event()))
            while not await client.hexists(keys.workers, settings.worker_name):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            thread.ready()
            assert await self._serving == 0
        except asyncio.CancelledError:
            assert self._serving.cancelled()
        finally:
            await self.engine.stop()
            await calls.disconnect()
            await client.aclose()


class RunningGateway:
    """A gateway on a free port, with its own event loop; `url` is its address."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self._thread = _LoopThread(self._main)
        self.server: GatewayServer
        self.url = ""

    @property
    def app(self) -> Any:
        return self.server.app

    def start(self) -> RunningGateway:
        self._thread.start()
        return self

    def stop(self) -> None:
        """End it as SIGTERM does, and wait until it is gone."""
        self._thread.stop()

    def __enter__(self) -> RunningGateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the gateway's own loop."""
        return self._thread.run(work)

    async def _main(self, thread: _LoopThread) -> None:
        self.server = GatewayServer(self.settings)
        self.url = self.server.url
        await self.server.run(thread.stopping, on_ready=thread.ready)


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
