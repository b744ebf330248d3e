from dataclasses import replace

import pytest
import torch

from inferq.kernels.attention import AttentionOps, attention_ops
from inferq.kernels.native.library import load_native
from inferq.kernels.reference import ReferenceAttention

CPU = torch.device("cpu")
PADDING_ROW = (-1, 1)
MIXED = [
    *[(0, 1), (14, 1), (15, 1), (16, 1), PADDING_ROW, (99, 1), (120, 1), (999, 1)],
    *[(0, 15), (3, 16), (100, 17), (0, 30), (40, 270)],
]

# One rounding of the output against one of the probabilities and one of the output.
ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize(("dtype", "atol"), ATOL.items(), ids=lambda value: str(value))


@pytest.fixture
def native() -> AttentionOps:
    if load_native() is None:
        pytest.skip("no native kernels here")
    return attention_ops(CPU, "native")


@pytest.fixture(params=["torch", "native"])
def ops(request) -> AttentionOps:
    if request.param == "native":
        return request.getfixturevalue("native")
    return attention_ops(CPU, "torch")


@DTYPES
@pytest.mark.parametrize(
    ("window", "soft_cap"), [(None, None), (None, 5.0), (1, None), (16, 5.0), (100, None)]
)
def test_a_mixed_batch_agrees_with_the_reference(ops, make_case, dtype, atol, window, soft_cap):
    case = make_case(MIXED, heads=3, kv_heads=1, dtype=dtype)
    case.assert_agrees(ops, atol=atol, window=window, soft_cap=soft_cap)


@pytest.mark.parametrize("head_dim", [8, 20, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (4, 1), (7, 1), (8, 1)])
def test_head_shapes_agree_with_the_reference(ops, make_case, head_dim, heads, kv_heads):
    case = make_case([(16, 1), (33, 1), (5, 20)], heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    case.assert_agrees(ops, atol=ATOL[torch.float32])


@pytest.mark.parametrize("window", [31, 32, 33])
def test_a_window_at_the_length_of_the_sequence_agrees(ops, make_case, window):
    case = make_case([(31, 1), (0, 32), (10, 22)])
    case.assert_agrees(ops, atol=ATOL[torch.float32], window=window)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_other_block_sizes_agree(ops, make_case, block_size):
    case = make_case([(30, 1), PADDING_ROW, (7, 12)], block_size=block_size)
    case.assert_agrees(ops, atol=ATOL[torch.float32], window=9)


def test_a_padding_row_gives_zeros(ops, make_case):
    case = make_case([(5, 1), PADDING_ROW])
    output, _ = case.run(ops)
    assert output[0].any()
    assert not output[1].any()


def test_a_lone_token_outside_the_decodes_agrees(ops, make_case):
    case = make_case([(4, 9), (12, 1)])
    case.assert_agrees(ops, atol=ATOL[torch.float32])


def test_layers_with_and_without_a_window_share_a_plan(ops, make_case):
    case = make_case([(50, 1), (0, 40)])
    kv = case.kv.clone()
    reference = ReferenceAttention()
    plan = ops.plan(case.batch)
    ops.write_kv(case.key, case.value, kv[:, 1], plan)
    for window in (None, 8, None):
        output = ops.attend(case.query, kv[:, 1], plan, scale=0.1, window=window)
        expected = reference.attend(
            case.query, kv[:, 1], reference.plan(case.batch), scale=0.1, window=window
        )
        torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[torch.float32])


def test_a_plan_of_another_form_is_refused(ops, make_case):
    case = make_case([(5, 1)])
    plan = ReferenceAttention().plan(case.batch)
    with pytest.raises(TypeError, match="another attention form"):
        ops.attend(case.query, case.kv[:, 1], plan, scale=1.0)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    "sequences", [[(700, 1)], [(260, 1), (5, 1), (300, 1)], [(500, 1), (0, 70)]]
)
def test_sequences_that_several_threads_share_agree(native, make_case, threads, sequences):
    case = make_case(sequences, heads=6, kv_heads=2)
    expected, _ = case.run(ReferenceAttention())
    torch.set_num_threads(threads)
    output, _ = case.run(native)
    torch.testing.assert_close(output, expected, rtol=0, atol=ATOL[torch.float32])


def test_a_cache_in_another_dtype_than_the_query_agrees(native, make_case):
    case = make_case([(20, 1), (3, 12)], dtype=torch.bfloat16)
    wide = replace(case, query=case.query.float(), key=case.key.float(), value=case.value.float())
    wide.assert_agrees(native, atol=ATOL[torch.float32])


def test_heads_that_are_not_dense_agree(ops, make_case):
    case = make_case([(20, 1), (3, 12)])
    strided = (torch.stack((x, x), dim=-1)[..., 0] for x in (case.query, case.key, case.value))
    query, key, value = strided
    assert query.stride(-1) == 2
    strided_case = replace(case, query=query, key=key, value=value)
    strided_case.assert_agrees(ops, atol=ATOL[torch.float32])


def test_a_block_that_the_cache_does_not_have_is_an_error(ops, make_case):
    case = make_case([(20, 1)])
    with pytest.raises(IndexError):
        replace(case, kv=case.kv[:1]).run(ops)


def test_a_score_that_is_not_finite_makes_its_row_not_finite(ops, make_case):
    case = make_case([(20, 1), (3, 12)])
    case.query[0] = torch.nan
    output, _ = case.run(ops)
    assert output[0].isnan().all()
    assert output[1:].isfinite().all()
