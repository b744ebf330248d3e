"""The engine's own process: runs steps, and never waits for Redis; a thread beside it encodes.

A reader thread fills the inbox, a writer thread empties the outbox (see `frames`); when the parent
is gone, the process ends at once. An exception in a step ends it too: the state on the device is
unknown then, and other workers take the jobs over.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from inferq.protocol.errors import InferqError, InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.protocol.snapshots import BlockSnapshot
from inferq.runtime.logs import configure_logging
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine, TokenOutput
from inferq.worker.engine.requests.request_events import RequestEvent
from inferq.worker.engine.requests.sequence import EngineRequest, ResumedOutput
from inferq.worker.model.running.host_threads import share_cores
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.pipe.frames import encode_events, encode_output, pack, unpack

#: Exit status when the parent went away, when the model could not be loaded, and when another rank
#: of a divided model is gone.
EXIT_ORPHANED: Final = 70
EXIT_NOT_LOADED: Final = 71
EXIT_RANK_LOST: Final = 72

#: Seconds, tokens and sequences of one step.
TimedStep = tuple[float, int, int]


class Outbox:
    """Merges the outputs of steps until the writer thread has sent the last ones."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._condition = threading.Condition()
        self._outputs: dict[tuple[str, int], EngineOutput] = {}
        self._steps = 0
        self._stats: dict[str, int] = {}
        self._timed: list[TimedStep] = []
        self._events: list[RequestEvent] = []
        self._blocks: tuple[float, BlockSnapshot] | None = None
        self._changed = False
        threading.Thread(target=self._write, name="outbox", daemon=True).start()

    def put(
        self,
        outputs: list[TokenOutput],
        steps: int,
        stats: dict[str, int],
        events: Sequence[RequestEvent] = (),
        timed: TimedStep | None = None,
    ) -> None:
        """Add what one step brought, and if it computed anything, how much in what time."""
        with self._condition:
            for step in outputs:
                output = EngineOutput.of_step(step)
                # Taken out and put back at the end: a request's last output stays its last.
                held = self._outputs.pop((output.request_id, output.index), None)
                merged = output if held is None else held.followed_by(output)
                self._outputs[output.request_id, output.index] = merged
            self._events += events
            if timed is not None:
                self._timed.append(timed)
            self._steps, self._stats, self._changed = steps, stats, True
            self._condition.notify()

    def put_blocks(self, seconds: float, snapshot: BlockSnapshot) -> None:
        """Answer what the blocks hold, which took so long to find."""
        with self._condition:
            self._blocks, self._changed = (seconds, snapshot), True
            self._condition.notify()

    def _write(self) -> None:
        try:
            while True:
                with self._condition:
                    self._condition.wait_for(lambda: self._changed)
                    outputs, self._outputs = self._outputs, {}
                    events, self._events = self._events, []
                    timed, self._timed = self._timed, []
                    blocks, self._blocks = self._blocks, None
                    steps, stats, self._changed = self._steps, self._stats, False
                if events:  # before the outputs that they led to
                    self._connection.send_bytes(pack(["events", encode_events(events)]))
                rows = [encode_output(output) for output in outputs.values()]
                self._connection.send_bytes(pack(["steps", steps, rows, stats, timed]))
                if blocks is not None:
                    seconds, snapshot = blocks
                    self._connection.send_bytes(pack(["blocks", seconds, snapshot.encode()]))
        except OSError:
            os._exit(EXIT_ORPHANED)


class EngineLoop:
    """Feeds the engine from the inbox and steps it while there is work."""

    def __init__(self, engine: Engine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._inbox: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._outbox = Outbox(connection)
        self._steps = 0
        self._peak_blocks = 0
        self._seen = engine.stats()

    def run(self) -> None:
        """Serve until the parent goes away (the reader thread then ends the process)."""
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        while True:
            self._take_commands()
            began = time.perf_counter()
            outputs = self._engine.step()
            self._steps += 1
            self._report(outputs, time.perf_counter() - began)

    def _take_commands(self) -> None:
        """Apply all commands that wait; block for one while the engine has nothing to do."""
        while True:
            try:
                command = self._inbox.get(block=not self._engine.has_work())
            except queue.Empty:
                return
            match command:
                case ["add", *fields]:
                    self._add(*fields)
                case ["abort", outputs]:
                    for request_id, index in outputs:
                        self._abort(request_id, index)
                    self._report([])
                case ["blocks"]:
                    began = time.perf_counter()
                    snapshot = self._engine.block_map()
                    self._outbox.put_blocks(time.perf_counter() - began, snapshot)

    def _add(
        self,
        request_id: str,
        prompt: list[int],
        resumed: list[tuple[list[int], bool]],
        params: dict[str, Any],
        priority: int,
        cache_salt: str,
        adapter: str,
        traced: bool,
    ) -> None:
        try:
            self._engine.add_request(
                EngineRequest(
                    request_id=request_id,
                    prompt_token_ids=tuple(prompt),
                    resumed=tuple(ResumedOutput(tuple(ids), ended) for ids, ended in resumed),
                    params=SamplingParams.from_wire(params),
                    priority=priority,
                    arrival=time.monotonic(),
                    cache_salt=cache_salt,
                    adapter=adapter,
                    traced=traced,
                )
            )
        except InvalidRequestError as error:
            self._report(
                [
                    TokenOutput(
                        request_id=request_id,
                        finish_reason=FinishReason.ERROR,
                        error=error.info,
                        request_finished=True,
                    )
                ]
            )

    def _abort(self, request_id: str, index: int | None) -> None:
        if index is None:
            self._engine.abort(request_id)
        else:
            self._engine.abort(request_id, index)

    def _report(self, outputs: list[TokenOutput], seconds: float = 0.0) -> None:
        stats, seen = self._engine.stats(), self._seen
        self._seen = stats
        timed = None
        if stats.num_steps > seen.num_steps:
            tokens = stats.computed_tokens - seen.computed_tokens
            timed = (seconds, tokens, stats.computed_sequences - seen.computed_sequences)
        self._peak_blocks = max(self._peak_blocks, stats.blocks_used)
        self._outbox.put(
            outputs,
            self._steps,
            {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "free": stats.blocks_free,
                "cached": stats.blocks_cached,
                "peak": self._peak_blocks,
                "swapped": stats.num_swapped,
                "preemptions": stats.num_preemptions,
                "swaps": stats.num_swaps,
                "swap_blocks": stats.swap_blocks_total,
                "swap_blocks_used": stats.swap_blocks_used,
                "prefix_queries": stats.prefix_query_tokens,
                "prefix_hits": stats.prefix_hit_tokens,
            },
            self._engine.take_events(),
            timed,
        )

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(unpack(self._connection.recv_bytes()))
        except (EOFError, OSError):
            os._exit(EXIT_ORPHANED)


def main(connection: Connection) -> int:
    """Load the model that the first frame names, then serve it; return the exit status."""
    try:
        [options] = unpack(connection.recv_bytes())
    except (EOFError, OSError):
        return EXIT_ORPHANED
    configure_logging(options.pop("log_level"), options.pop("log_format", "auto"))
    share_cores()  # before torch is imported
    from inferq.worker.factory import load_engine

    try:
        config = EngineConfig(**options)
        # At once: a step may hang on the lost rank, and an idle worker must take no more jobs.
        engine = load_engine(config, on_rank_lost=lambda: os._exit(EXIT_RANK_LOST))
    except InferqError as error:
        return EXIT_NOT_LOADED if _send(connection, _failure(error)) else EXIT_ORPHANED
    info = {
        "num_blocks": engine.stats().blocks_total,
        "block_size": config.block_size,
        "max_model_len": engine.max_model_len,
        "vocab_size": engine.vocab_size,
    }
    if not _send(connection, ["ready", info]):
        return EXIT_ORPHANED
    EngineLoop(engine, connection).run()
    return 0


def _failure(error: InferqError) -> list[Any]:
    """Return the frame of an error, without the field that the other side's error begins with."""
    field = str(getattr(error, "field", "model"))
    return ["failed", str(error).removeprefix(f"{field}: "), field]


def _send(connection: Connection, frame: list[Any]) -> bool:
    """Send a frame; false if the parent has given up before us."""
    try:
        connection.send_bytes(pack(frame))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(Connection(int(sys.argv[1]))))
