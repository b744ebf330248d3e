"""What crosses the pipe from the engine, and how the process ends when nobody reads it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from inferq.protocol.messages import FinishReason
from inferq.protocol.snapshots import BlockSnapshot, HoldingSequence
from inferq.worker.engine.requests.token_output import TokenOutput
from inferq.worker.pipe.engine_process import (
    EXIT_NOT_LOADED,
    EXIT_ORPHANED,
    EXIT_RANK_LOST,
    Outbox,
)
from inferq.worker.pipe.frames import decode_output, pack, unpack


class SlowPipe:
    """A connection that takes its first frame only when told to."""

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []
        self.is_sending = threading.Event()
        self.may_send = threading.Event()
        self.has_second = threading.Event()

    def send_bytes(self, data: bytes) -> None:
        self.is_sending.set()
        assert self.may_send.wait(10)
        self.frames.append(unpack(data))
        if len(self.frames) == 2:
            self.has_second.set()


def step(index: int, token_id: int, **end: Any) -> TokenOutput:
    return TokenOutput("r", (token_id,), index=index, cumulative_logprob=-float(token_id), **end)


def test_outputs_merge_while_the_pipe_is_busy_and_the_requests_end_comes_last() -> None:
    pipe = SlowPipe()
    outbox = Outbox(pipe)  # type: ignore[arg-type]
    outbox.put([], 0, {})
    steps_taken = [(0.25, 7, 2), (0.5, 2, 2), (0.125, 1, 1)]
    assert pipe.is_sending.wait(10)
    outbox.put([step(0, 1), step(1, 2)], 1, {"running": 2}, timed=steps_taken[0])
    outbox.put(
        [step(1, 3, finish_reason=FinishReason.STOP), step(0, 4)],
        2,
        {"running": 1},
        timed=steps_taken[1],
    )
    last = step(0, 5, finish_reason=FinishReason.LENGTH, request_finished=True)
    outbox.put([last], 3, {"running": 0}, timed=steps_taken[2])
    pipe.may_send.set()
    assert pipe.has_second.wait(10)
    kind, steps, rows, stats, timed = pipe.frames[1]
    assert (kind, steps, stats) == ("steps", 3, {"running": 0})
    assert [tuple(row) for row in timed] == steps_taken
    first, second = (decode_output(row) for row in rows)
    assert (first.index, first.token_ids, first.finish_reason) == (1, (2, 3), FinishReason.STOP)
    assert (second.index, second.token_ids) == (0, (1, 4, 5))
    assert second.cumulative_logprobs == (-1.0, -4.0, -5.0)
    assert second.request_finished


def test_a_block_map_follows_the_outputs() -> None:
    pipe = SlowPipe()
    outbox = Outbox(pipe)  # type: ignore[arg-type]
    outbox.put_blocks(
        0.25, BlockSnapshot(2, 1, [2, 3, 2, 0, 1, 0, 0, 0], [HoldingSequence("5c6d7e", 1, 40)])
    )
    pipe.may_send.set()
    assert pipe.has_second.wait(10)
    assert [kind for kind, *_ in pipe.frames] == ["steps", "blocks"]
    assert pipe.frames[1][1] == 0.25
    snapshot = BlockSnapshot.decode(pipe.frames[1][2])
    assert (snapshot.num_blocks, snapshot.num_host_blocks) == (2, 1)
    assert snapshot.counts() == {"free": 0, "cached": 0, "used": 0, "shared": 2, "swapped": 0}
    [sequence] = snapshot.sequences
    assert (sequence.job, sequence.index, sequence.num_tokens) == ("5c6d7e", 1, 40)


PROCESS = ("-m", "inferq.worker.pipe.engine_process")
#: The same process with a model that is loaded at once.
LOADED_PROCESS = (
    "-c",
    """
import logging, sys
from multiprocessing.connection import Connection
from types import SimpleNamespace
from inferq.worker import factory
from inferq.worker.pipe import engine_process

def load_engine(config, **handlers):
    logging.getLogger("inferq.worker.model").info("%d weights", 7)
    stats = SimpleNamespace(blocks_total=1)
    return SimpleNamespace(stats=lambda: stats, max_model_len=1, vocab_size=1)

factory.load_engine = load_engine
sys.exit(engine_process.main(Connection(int(sys.argv[1]))))
""",
)


def run_engine(
    options: dict[str, Any] | None, *, close: bool, process: tuple[str, str] = PROCESS
) -> tuple[int, str, list[Any]]:
    """Start an engine process; with `close` the parent's end is gone before it can answer."""
    ours, theirs = Pipe()
    with theirs:
        started = subprocess.Popen(
            [sys.executable, *process, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    with ours:
        if options is not None:
            ours.send_bytes(pack([options]))
        if close:
            ours.close()
        frame = [] if close else unpack(ours.recv_bytes())
    _, said = started.communicate(timeout=60)
    return started.returncode, said, frame


@pytest.fixture
def no_model(tmp_path: Path) -> dict[str, Any]:
    return {"model": str(tmp_path), "log_level": "info", "log_format": "json"}


def test_a_parent_that_gives_up_during_the_start_leaves_a_quiet_orphan(
    no_model: dict[str, Any],
) -> None:
    assert run_engine(None, close=True) == (EXIT_ORPHANED, "", [])
    assert run_engine(no_model, close=True) == (EXIT_ORPHANED, "", [])


def test_a_parent_that_is_gone_when_the_model_is_loaded_leaves_a_quiet_orphan(
    no_model: dict[str, Any],
) -> None:
    status, said, _ = run_engine(no_model, close=True, process=LOADED_PROCESS)
    assert status == EXIT_ORPHANED
    [line] = said.splitlines()  # in the form that the worker's settings ask for
    row = json.loads(line)
    assert (row["event"], row["level"], row["logger"]) == (
        "7 weights",
        "info",
        "inferq.worker.model",
    )


def test_why_a_model_is_not_loaded_is_said_without_its_field(no_model: dict[str, Any]) -> None:
    status, said, [kind, message, field] = run_engine(no_model, close=False)
    assert (status, said, kind, field) == (EXIT_NOT_LOADED, "", "failed", "model")
    assert str(no_model["model"]) in message
    assert not message.startswith("model:")


#: The same with a model that loses a rank while there is nothing to do.
LOSING_PROCESS = (
    "-c",
    LOADED_PROCESS[1]
    .replace(
        "    stats = ",
        '    threading.Timer(0.1, handlers["on_rank_lost"]).start()\n    stats = ',
    )
    .replace("import logging, sys", "import logging, sys, threading")
    .replace("vocab_size=1)", "vocab_size=1, has_work=lambda: False)"),
)


def test_a_lost_rank_ends_an_idle_process_too(no_model: dict[str, Any]) -> None:
    ours, theirs = Pipe()
    with theirs:
        started = subprocess.Popen(
            [sys.executable, *LOSING_PROCESS, str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
    with ours:
        ours.send_bytes(pack([no_model]))
        assert started.wait(60) == EXIT_RANK_LOST
