"""Replays recorded launches, as a captured CUDA graph does, over buffers that changed in place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from inferq.kernels import triton_attention
from inferq.kernels.attention import AttentionBatch
from inferq.kernels.reference import ReferenceAttention
from inferq.kernels.triton_attention import TritonAttention, Tuning, prefill_tiles
from inferq.kernels.triton_schedule import (
    SplitPolicy,
    count_items,
    schedule_decodes,
    splits_any,
)

CPU = torch.device("cpu")
PADDING_ROW = (-1, 1)
MAX_SEQ_LEN = 160
WINDOW, SOFT_CAP = 50, 5.0
FINE = SplitPolicy(programs_per_processor=4, min_tokens=32, grain=16)


@dataclass
class Launches:
    """The kernel launches of a capture: what a CUDA graph keeps."""

    recorded: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    run: Callable[..., Any] = InterpretedFunction.run

    def replay(self) -> None:
        for kernel, arguments, options in self.recorded:
            self.run(kernel, *arguments, **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()

    def record(kernel: Any, *arguments: Any, **options: Any) -> Any:
        found.recorded.append((kernel, arguments, options))
        return found.run(kernel, *arguments, **options)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return found


@dataclass
class Buffers:
    """What a captured decode step reads and writes: all of it stays where it is."""

    batch: AttentionBatch
    kv: Tensor
    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def like(case: Any, blocks: int) -> "Buffers":
        rows = len(case.batch.query_lens)
        qkv = torch.full((rows, case.query.shape[1] + 2 * case.key.shape[1], 64), torch.nan)
        heads = [case.query.shape[1], case.key.shape[1], case.key.shape[1]]
        batch = AttentionBatch(
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
            seq_lens=torch.zeros(rows, dtype=torch.int32),
            block_tables=torch.zeros(rows, MAX_SEQ_LEN // 16, dtype=torch.int32),
            slot_mapping=torch.full((rows,), -1),
            num_decodes=rows,
            query_lens=(1,) * rows,
            context_lens=(-1,) * rows,
            block_size=16,
            max_seq_len=MAX_SEQ_LEN,
        )
        return Buffers(batch, case.kv.new_full((blocks, *case.kv.shape[1:]), torch.nan),
                       *qkv.split(heads, dim=1))  # fmt: skip

    def fill(self, case: Any) -> None:
        """Take over another step, as the engine does before a replay."""
        self.kv.fill_(torch.nan)[: len(case.kv)] = case.kv
        self.batch.seq_lens.copy_(case.batch.seq_lens)
        self.batch.slot_mapping.copy_(case.batch.slot_mapping)
        self.batch.block_tables.zero_()[:, : case.batch.block_tables.shape[1]] = (
            case.batch.block_tables
        )
        self.query.copy_(case.query)
        self.key.copy_(case.key)
        self.value.copy_(case.value)

    def step(self, ops: TritonAttention) -> tuple[Tensor, Tensor]:
        """Write once, then attend as two layers of different kinds do."""
        plan = ops.plan(self.batch)
        layer = self.kv[:, 1]
        ops.write_kv(self.key, self.value, layer, plan)
        return (
            ops.attend(self.query, layer, plan, scale=0.125),
            ops.attend(
                self.query, layer, plan, scale=0.125, window=WINDOW, soft_cap=SOFT_CAP
            ),
        )  # fmt: skip


# (context, 1) of each row at one step after the other.
STEPS = [
    [(14, 1), (31, 1), (62, 1), PADDING_ROW],
    [(15, 1), (32, 1), (63, 1), (0, 1)],  # a row begins; the others reach the end of a page
    [(16, 1), (33, 1), (64, 1), (1, 1)],  # and go over it, and over a split
    [PADDING_ROW, (159, 1), PADDING_ROW, (16, 1)],  # rows turn into padding; one is the longest
    [(159, 1), (159, 1), (159, 1), (159, 1)],
    [PADDING_ROW] * 4,
    [(120, 1), PADDING_ROW, (47, 1), (48, 1)],
]


@pytest.mark.parametrize(("processors", "kv_heads"), [(3, 2), (1000, 1)])
def test_a_replayed_graph_follows_its_buffers(make_case, launches, processors, kv_heads):
    cases = [make_case(step, heads=2 * kv_heads, kv_heads=kv_heads) for step in STEPS]
    buffers = Buffers.like(cases[0], blocks=max(len(case.kv) for case in cases))
    ops = TritonAttention(CPU, Tuning(splits=FINE, processors=processors))
    outputs = buffers.step(ops)
    captured = list(launches.recorded)
    assert not any(output.any() for output in outputs)
    assert buffers.kv.isnan().all()

    for case in cases:
        buffers.fill(case)
        for output in outputs:
            output.fill_(torch.nan)
        launches.replay()
        reference = ReferenceAttention()
        expected, expected_kv = case.run(reference)
        capped, _ = case.run(reference, window=WINDOW, soft_cap=SOFT_CAP)
        torch.testing.assert_close(outputs[0], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(outputs[1], capped, rtol=0, atol=1e-5)
        stored = buffers.kv[: len(case.kv)]
        torch.testing.assert_close(stored, expected_kv, rtol=0, atol=0, equal_nan=True)
    assert launches.recorded == captured


def test_launches_do_not_depend_on_the_hosts_lengths(make_case, launches):
    grids = []
    for step in (STEPS[0], STEPS[4], STEPS[5]):
        buffers = Buffers.like(make_case(step), blocks=60)
        launches.recorded.clear()
        buffers.step(TritonAttention(CPU, Tuning(splits=FINE, processors=7)))
        grids.append([(kernel, options["grid"]) for kernel, _, options in launches.recorded])
    assert grids[0] == grids[1] == grids[2]


def test_a_plan_from_outside_of_the_capture_is_refused(make_case, monkeypatch):
    case = make_case([(5, 1)])
    ops = TritonAttention(CPU)
    plan = ops.plan(case.batch)
    monkeypatch.setattr(triton_attention, "_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="inside the same CUDA graph capture"):
        ops.attend(case.query, case.kv[:, 1], plan, scale=1.0)


def test_only_the_long_decode_of_a_mixed_batch_is_split(make_case):
    case = make_case([(199, 1), (5, 1), (9, 20)])
    ops = TritonAttention(CPU, Tuning(splits=FINE, processors=1000))
    case.assert_agrees(ops, atol=1e-5)
    plan = ops.plan(case.batch)
    ops.write_kv(case.key, case.value, case.kv[:, 1], plan)
    ops.attend(case.query, case.kv[:, 1], plan, scale=1.0)
    (work,) = plan.work.values()
    assert work.starts.tolist() == [0, 7, 8]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("programs", [3, 40, 1000])
@pytest.mark.parametrize("policy", [FINE, SplitPolicy()], ids=["fine", "default"])
def test_the_schedule_covers_every_token_once(policy, programs, window):
    generator = torch.Generator().manual_seed(programs)
    for rows in (1, 5, 30):
        lens = torch.randint(0, 3000, (rows,), generator=generator, dtype=torch.int32)
        lens[::7] = 0
        lens[-1] = 3000
        items = count_items(rows, 2, 3000, window, programs, policy)
        work = schedule_decodes(
            lens, items, (4, 2), 64, window=window, programs=programs, policy=policy
        )  # fmt: skip
        starts = work.starts.tolist()
        parts = work.items.T.tolist()
        seen = []
        for row, length in enumerate(lens.tolist()):
            first = 0 if window is None else max(0, length - window)
            seen.append(length - first)
            own = parts[starts[row] : starts[row + 1]]
            assert all(part[0] == row and part[3] == (len(own) == 1) for part in own)
            assert all((part[1] - first) % policy.grain == 0 for part in own)
            assert all(part[1] < part[2] for part in own)
            ends = [first, *(part[2] for part in own)]
            assert [part[1] for part in own] == ends[:-1]
            assert ends[-1] == length
        assert all(part[0] == -1 for part in parts[starts[-1] :])
        assert splits_any(seen, 2, programs, policy) == any(
            part[3] == 0 for part in parts[: starts[-1]]
        )
        assert starts[-1] <= items


def test_long_prompts_are_tiled_with_what_sees_most_first(make_case):
    batch = make_case([(9, 1), (3, 5), (0, 33), (70, 16)]).batch
    table = prefill_tiles(batch, 16)
    assert table.dtype == torch.int32
    assert table.tolist() == [[3, 0], [2, 32], [2, 16], [1, 0], [2, 0]]
