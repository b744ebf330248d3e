import pytest
import torch

from inferq.kernels.cpu_attention import CpuAttention
from inferq.kernels.reference import ReferenceAttention

PADDING_ROW = (-1, 1)
MIXED = [
    *[(0, 1), (14, 1), (15, 1), (16, 1), PADDING_ROW, (99, 1), (120, 1), (999, 1)],
    *[(0, 15), (3, 16), (100, 17), (0, 30), (40, 270)],
]

# One rounding of the output against one of the probabilities and one of the output.
ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize(("dtype", "atol"), ATOL.items(), ids=lambda value: str(value))


@DTYPES
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, None), (None, 5.0), (1, None), (16, 5.0), (100, None)]
)
def test_a_mixed_batch_agrees_with_the_reference(make_case, dtype, atol, window, soft_cap):
    case = make_case(MIXED, heads=3, kv_heads=1, dtype=dtype)
    case.assert_agrees(CpuAttention(), atol=atol, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (7, 1), (8, 1)])
def test_head_shapes_agree_with_the_reference(make_case, head_dim, heads, kv_heads):
    case = make_case([(16, 1), (33, 1), (5, 20)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case.assert_agrees(CpuAttention(), atol=ATOL[torch.float32])


@pytest.mark.parametrize("window", [31, 32, 33])
def test_a_window_at_the_length_of_the_sequence_agrees(make_case, window):
    case = make_case([(31, 1), (0, 32), (10, 22)])
    case.assert_agrees(CpuAttention(), atol=ATOL[torch.float32], window=window)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_other_block_sizes_agree(make_case, block_size):
    case = make_case([(30, 1), PADDING_ROW, (7, 12)], block_size=block_size)
    case.assert_agrees(CpuAttention(), atol=ATOL[torch.float32], window=9)


def test_a_padding_row_gives_zeros(make_case):
    case = make_case([(5, 1), PADDING_ROW])
    output, _ = case.run(CpuAttention())
    assert output[0].any()
    assert not output[1].any()


def test_a_lone_token_outside_the_decodes_agrees(make_case):
    case = make_case([(4, 9), (12, 1)])
    case.assert_agrees(CpuAttention(), atol=ATOL[torch.float32])


def test_layers_with_and_without_a_window_share_a_plan(make_case):
    case = make_case([(50, 1), (0, 40)])
    kv = case.kv.clone()
    ops, reference = CpuAttention(), ReferenceAttention()
    plan = ops.plan(case.batch)
    ops.write_kv(case.key, case.value, kv[:, 1], plan)
    for window in (None, 8, None):
        output = ops.attend(case.query, kv[:, 1], plan, scale=0.1, window=window)
        expected = reference.attend(
            case.query, kv[:, 1], reference.plan(case.batch), scale=0.1, window=window
        )
        torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[torch.float32])


def test_a_plan_of_another_form_is_refused(make_case):
    case = make_case([(5, 1)])
    plan = ReferenceAttention().plan(case.batch)
    with pytest.raises(TypeError, match="another attention form"):
        CpuAttention().attend(case.query, case.kv[:, 1], plan, scale=1.0)
