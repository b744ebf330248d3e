"""A worker whose engine's tokens the test brings; all but the engine is the real thing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from inferq.protocol.keys import QueueKeys
from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.protocol.scripts import QueueScripts
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.pipe.engine_client import EngineClient, EngineInfo
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.queue.script_connection import ScriptConnection
from inferq.worker.service import WorkerSession, connect
from inferq.worker.settings import WorkerSettings

#: Seconds after which a wait for what must come has failed.
TIMEOUT_S = 100


class HandEngine(EngineClient):
    """An engine without a process, whose tokens the test brings."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, SamplingParams] = {}
        self.may_start = asyncio.Event()
        self.changed = asyncio.Event()

    async def start(self, options: dict[str, Any]) -> EngineInfo:
        await self.may_start.wait()
        return EngineInfo(num_blocks=64, block_size=16, max_model_len=1024, vocab_size=49152)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        **_options: Any,
    ) -> None:
        self.requests[request_id] = params
        self.changed.set()

    def abort(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.changed.set()

    async def stop(self) -> None:
        """Nothing runs."""

    def die(self) -> None:
        """Close the pipe, as a process that is killed does."""
        self._dead.set()

    def bring(
        self,
        request_id: str,
        *token_ids: int,
        index: int = 0,
        end: FinishReason | None = None,
        is_last: bool = True,
    ) -> None:
        """Bring tokens to an output, all at once."""
        is_over = end is not None and is_last
        output = EngineOutput(
            request_id, index, token_ids, finish_reason=end, request_finished=is_over
        )
        if is_over:
            del self.requests[request_id]
        self.on_outputs([output])

    async def wait_for(self, job_id: str, epoch: int = 1) -> str:
        """Return the name of a job's request as soon as it is here."""
        name = f"{job_id}:{epoch}"
        await self.wait_until(lambda: name in self.requests)
        return name

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait for what requests that come or are dropped bring about."""
        async with asyncio.timeout(TIMEOUT_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


class HandWorker:
    """A worker with a `HandEngine` in the test's own loop; `code` is what it ends with.

    Its leases outlast the test, so that no job leaves it by their end.
    """

    def __init__(self, url: str, queue: str, **settings: Any) -> None:
        given = {"worker_name": "hand", "lease_s": 600, "retention_s": 1200, **settings}
        self._settings = WorkerSettings(
            model="hand",
            redis_url=url,  # type: ignore[arg-type]
            queue=queue,
            **given,
        )
        self.name = self._settings.worker_name
        self._keys = keys = QueueKeys(queue)
        self._client = connect(url, keys)
        self._calls = ScriptConnection(self._client)
        self.scripts = QueueScripts(self._calls, keys)
        self.tokenizer = byte_tokenizer()
        self.engine = HandEngine()
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.session: WorkerSession
        self.code: asyncio.Task[int]

    async def load(self) -> None:
        """Make the session, whose parts the test may change before it enters."""
        await self.scripts.load()
        self.engine.may_start.set()
        info = await self.engine.start({})
        self.session = WorkerSession(
            self._settings,
            self._keys,
            self._client,
            self.scripts,
            self.engine,
            info,
            self.tokenizer,
        )

    async def __aenter__(self) -> Self:
        if not hasattr(self, "session"):
            await self.load()
        self.code = asyncio.create_task(self.session.serve(self.stop, self.hurry))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while not self.code.done():
            self.code.cancel()
            await asyncio.wait([self.code], timeout=0.5)
        await self._calls.disconnect()
        await self._client.aclose()

    async def ended(self) -> int:
        """Return the code that it ends with, once it has."""
        return await asyncio.wait_for(asyncio.shield(self.code), TIMEOUT_S)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    return Tokenizer(fast)
