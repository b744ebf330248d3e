"""What crosses the pipe from the engine: merged by output, a request's end last."""

from __future__ import annotations

import threading
from typing import Any

from inferq.protocol.messages import FinishReason
from inferq.worker.engine.token_output import TokenOutput
from inferq.worker.engine_process import Outbox
from inferq.worker.frames import decode_output, unpack


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
    assert pipe.is_sending.wait(10)
    outbox.put([step(0, 1), step(1, 2)], 1, {"running": 2})
    outbox.put([step(1, 3, finish_reason=FinishReason.STOP), step(0, 4)], 2, {"running": 1})
    last = step(0, 5, finish_reason=FinishReason.LENGTH, request_finished=True)
    outbox.put([last], 3, {"running": 0})
    pipe.may_send.set()
    assert pipe.has_second.wait(10)
    kind, steps, rows, stats = pipe.frames[1]
    assert (kind, steps, stats) == ("steps", 3, {"running": 0})
    first, second = (decode_output(row) for row in rows)
    assert (first.index, first.token_ids, first.finish_reason) == (1, (2, 3), FinishReason.STOP)
    assert (second.index, second.token_ids) == (0, (1, 4, 5))
    assert second.cumulative_logprobs == (-1.0, -4.0, -5.0)
    assert second.request_finished
