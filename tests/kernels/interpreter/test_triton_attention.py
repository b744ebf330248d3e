import pytest
import torch

from inferq.kernels.reference import ReferenceAttention
from inferq.kernels.triton_attention import TritonAttention, Tuning
from inferq.kernels.triton_schedule import SplitPolicy

PADDING_ROW = (-1, 1)

# float32: the order of additions. Others: weights rounded to the cache's dtype before the second
# product, and the output.
ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize(("dtype", "atol"), ATOL.items(), ids=lambda value: str(value))
HEAD_SHAPES = pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.float32),
        (80, torch.float16),
        (96, torch.float32),
        (128, torch.float16),
        (256, torch.float32),
        (256, torch.float16),
    ],
)
# 1 to 8 query heads for each KV head, and more than a prefill's tile has rows.
GROUPS = [(1, 1), (2, 1), (6, 2), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (40, 1)]


@pytest.fixture
def splitting() -> TritonAttention:
    """Split decodes from 33 tokens on, so that short sequences are split too."""
    splits = SplitPolicy(min_tokens=32, grain=16)
    return TritonAttention(torch.device("cpu"), Tuning(splits=splits, processors=1000))


@HEAD_SHAPES
def test_decodes_agree_at_every_head_size(make_case, ops, head_dim, dtype):
    case = make_case(
        [(0, 1), (14, 1), (15, 1), (16, 1), (69, 1), PADDING_ROW], head_dim=head_dim, dtype=dtype
    )
    case.assert_agrees(ops, atol=ATOL[dtype])


@HEAD_SHAPES
def test_prefills_agree_at_every_head_size(make_case, ops, head_dim, dtype):
    case = make_case([(0, 15), (3, 16), (30, 17)], heads=2, head_dim=head_dim, dtype=dtype)
    case.assert_agrees(ops, atol=ATOL[dtype])


@pytest.mark.parametrize(("heads", "kv_heads"), GROUPS)
def test_mixed_batches_agree_at_every_group_size(make_case, splitting, heads, kv_heads):
    case = make_case([(16, 1), (40, 1), (9, 20)], heads=heads, kv_heads=kv_heads)
    case.assert_agrees(splitting, atol=ATOL[torch.float32])


@DTYPES
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, 5.0)])
def test_mixed_batches_agree_in_every_dtype(make_case, splitting, dtype, atol, window, soft_cap):
    case = make_case([(0, 1), PADDING_ROW, (99, 1), (50, 60)], dtype=dtype)
    case.assert_agrees(splitting, atol=atol, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("window", [1, 63, 64, 65])
def test_a_window_at_the_length_of_the_sequence_agrees(make_case, splitting, window):
    case = make_case([(63, 1), (0, 64)], heads=2)
    case.assert_agrees(splitting, atol=ATOL[torch.float32], window=window)


def test_long_sequences_agree(make_case, ops):
    case = make_case([(999, 1), (0, 1), (984, 16)], heads=1, kv_heads=1)
    case.assert_agrees(ops, atol=ATOL[torch.float32])


def test_more_splits_than_the_reduce_kernel_joins_at_once_agree(make_case, splitting):
    case = make_case([(699, 1), (10, 1), PADDING_ROW], heads=2, kv_heads=1)
    case.assert_agrees(splitting, atol=ATOL[torch.float32])


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_other_block_sizes_agree(make_case, splitting, block_size):
    case = make_case([(50, 1), (7, 30)], block_size=block_size)
    case.assert_agrees(splitting, atol=ATOL[torch.float32], window=33)


def test_padding_rows_alone_give_zeros(make_case, splitting):
    output, _ = make_case([PADDING_ROW, PADDING_ROW]).run(splitting)
    assert not output.any()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # inf is what the cap expects
def test_scores_beyond_the_exponents_range_are_capped(make_case, ops):
    case = make_case([(20, 1), (4, 9)])
    case.query.mul_(1e4)
    case.assert_agrees(ops, atol=1e-4, soft_cap=2.0)


def test_heads_that_are_not_contiguous_are_refused(make_case, ops):
    case = make_case([(5, 1)])
    strided = torch.zeros(1, 4, 128)[..., ::2]
    with pytest.raises(ValueError, match="contiguous heads"):
        ops.attend(strided, case.kv[:, 1], ops.plan(case.batch), scale=1.0)
    with pytest.raises(ValueError, match="contiguous heads"):
        ops.write_kv(strided[:, :2], case.value, case.kv[:, 1], ops.plan(case.batch))


def test_another_head_size_is_refused(make_case, ops):
    case = make_case([(5, 1)], head_dim=48)
    with pytest.raises(ValueError, match="head_dim 48 is not supported"):
        case.run(ops)


def test_a_plan_of_another_form_is_refused(make_case, ops):
    case = make_case([(5, 1)])
    plan = ReferenceAttention().plan(case.batch)
    with pytest.raises(TypeError, match="another attention form"):
        ops.attend(case.query, case.kv[:, 1], plan, scale=1.0)
