"""Attention over blocks that several sequences share, which are read once for all of them."""

from dataclasses import replace

import pytest
import torch

from inferq.kernels.attention import attention_ops
from inferq.kernels.cpu_attention_native import NativeAttention, NativePlan
from inferq.kernels.native.library import load_native
from inferq.kernels.reference import ReferenceAttention

BLOCK = 16
PADDING_ROW = (-1, 1)
ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture
def native() -> NativeAttention:
    if load_native() is None:
        pytest.skip("no native kernels here")
    ops = attention_ops(torch.device("cpu"), "native")
    assert isinstance(ops, NativeAttention)
    return ops


@pytest.fixture
def make_shared(make_case):
    """Make a case in which each of `groups` (sequences, blocks) begins with its first's blocks."""

    def make(sequences, groups, **options):
        case = make_case(sequences, **options)
        tables = case.batch.block_tables.clone()
        for members, blocks in groups:
            tables[members, :blocks] = tables[members[0], :blocks]
        return replace(case, batch=replace(case.batch, block_tables=tables))

    return make


def _found(native, case):
    plan = native.plan(case.batch)
    assert isinstance(plan, NativePlan)
    kv_heads = case.key.shape[1]
    found = native.shared_prefixes(plan, case.query.shape[1] // kv_heads)
    return None if found is None else found.tolist()


@pytest.mark.parametrize("count", [2, 5, 8, 11, 33])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (16, 2, 20), (6, 1, 80)])
def test_groups_of_all_sizes_agree(native, make_shared, count, heads, kv_heads, head_dim):
    sequences = [(96 + 7 * index, 1) for index in range(count)]
    case = make_shared(
        [(40, 1), *sequences, (3, 30)],
        [(list(range(1, count + 1)), 6)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    found = _found(native, case)
    if count * heads // kv_heads >= 24:
        assert found == [[0, *[1] * count, count + 1], [0, *[96] * count, 0]]
    case.assert_agrees(native, atol=ATOL[torch.float32])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_share_a_group_agree(native, make_shared, threads):
    case = make_shared([(150, 1)] * 11, [(list(range(11)), 6)], heads=9, kv_heads=3)
    expected, _ = case.run(ReferenceAttention())
    torch.set_num_threads(threads)
    output, _ = case.run(native)
    torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[torch.float32])


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 300, 90, 20])
def test_windows_and_soft_caps_agree(native, make_shared, dtype, soft_cap, window):
    sequences = [(80, 1), (95, 1), (96, 1), (200, 1), (80, 1), (81, 3), (100, 2)]
    case = make_shared(sequences, [(list(range(7)), 5)], heads=4, kv_heads=1, dtype=dtype)
    assert _found(native, case) == [[0] * 7, [80] * 7]
    case.assert_agrees(native, atol=ATOL[dtype], window=window, soft_cap=soft_cap)


def test_several_groups_and_loners_agree(native, make_shared):
    sequences = [(150, 1), (130, 1), (90, 1), PADDING_ROW, (140, 1), (96, 1), (100, 1), (64, 40)]
    groups = [([0, 4, 6], 6), ([1, 2], 5), ([5, 7], 4)]
    case = make_shared(sequences, groups, heads=12, kv_heads=1)
    assert _found(native, case) == [
        [0, 1, 1, 3, 0, 5, 0, 7],
        [96, 80, 80, 0, 96, 0, 96, 0],
    ]
    case.assert_agrees(native, atol=ATOL[torch.float32])


def test_the_length_that_spares_most_is_shared(native, make_shared):
    sequences = [(400, 1)] * 8
    few_long = make_shared(sequences, [(list(range(8)), 4), ([0, 3, 5], 24)], heads=8, kv_heads=1)
    assert _found(native, few_long) == [
        [0, 1, 1, 0, 1, 0, 1, 1],
        [384, 64, 64, 384, 64, 384, 64, 64],
    ]
    few_long.assert_agrees(native, atol=ATOL[torch.float32])
    many = make_shared(sequences, [(list(range(8)), 8), ([0, 3, 5], 9)], heads=8, kv_heads=1)
    assert _found(native, many) == [[0] * 8, [128] * 8]
    many.assert_agrees(native, atol=ATOL[torch.float32])


def test_only_blocks_from_before_the_step_are_shared(native, make_shared):
    """The sixth block is the first one's context, and for others where this step writes."""
    case = make_shared(
        [(96, 1), (95, 1), (80, 1), (85, 1)], [([0, 1, 2, 3], 5)], heads=6, kv_heads=1
    )
    tables = case.batch.block_tables
    assert _found(native, case) == [[0] * 4, [80] * 4]
    assert tables.shape[1] == 7
    case.assert_agrees(native, atol=ATOL[torch.float32])


def test_little_to_share_is_left_alone(native, make_shared):
    short = make_shared([(63, 1)] * 8, [(list(range(8)), 3)], heads=8, kv_heads=1)
    few = make_shared([(200, 1)] * 3, [([0, 1, 2], 10)], heads=7, kv_heads=1)
    full = make_shared([(200, 16)] * 3, [([0, 1, 2], 10)], heads=4, kv_heads=1)
    for case in (short, few, full):
        assert not any(_found(native, case)[1])
        case.assert_agrees(native, atol=ATOL[torch.float32])


def test_a_score_that_is_not_finite_stays_in_its_row(native, make_shared):
    case = make_shared([(100, 1)] * 6, [(list(range(6)), 6)], heads=4, kv_heads=1)
    case.query[2] = torch.nan
    output, _ = case.run(native)
    assert output[2].isnan().all()
    assert output[[0, 1, 3, 4, 5]].isfinite().all()


def test_tables_that_may_change_are_not_looked_at(native, make_shared):
    case = make_shared([(100, 1)] * 6, [(list(range(6)), 6)], heads=4, kv_heads=1)
    assert _found(native, case) is not None
    captured = replace(case, batch=replace(case.batch, max_seq_len=112))
    assert _found(native, captured) is None
    captured.assert_agrees(native, atol=ATOL[torch.float32])
