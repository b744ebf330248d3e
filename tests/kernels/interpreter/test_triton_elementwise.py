import pytest
import torch

from inferq.kernels import reference, triton_activation, triton_norm, triton_rotary

# float32: the order of additions; the others: one rounding to the type, the other way, and in
# bfloat16 two of them, which the interpreter truncates.
TOLERANCES = [
    pytest.param(torch.float32, 2e-6, 2e-6, id="float32"),
    pytest.param(torch.float16, 1e-3, 1e-3, id="float16"),
    pytest.param(torch.bfloat16, 2e-2, 1.6e-2, id="bfloat16"),
]
dtypes = pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
SIZES = [1, 63, 576, 1536]
# The interpreter computes exp of large negative gates, which overflows to inf as it should.
overflows = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_agrees(dtype, atol, rtol, size):
    x = (torch.randn(5, size) * 3).to(dtype)
    for weight in (torch.randn(size).to(dtype), torch.randn(size)):
        result = triton_norm.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(
            result, reference.rms_norm(x, weight, 1e-5), atol=atol, rtol=rtol
        )


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17])
def test_rms_norm_of_heads_within_the_fused_projection_agrees(rows):
    key = torch.randn(rows, 15, 96)[:, 9:12]
    weight = torch.randn(96)
    result = triton_norm.rms_norm(key, weight, 1e-6)
    assert result.is_contiguous()
    torch.testing.assert_close(result, reference.rms_norm(key, weight, 1e-6), atol=2e-6, rtol=2e-6)


@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_agrees_and_adds_in_place(dtype, atol, rtol, size):
    x, residual = (torch.randn(2, 3, size) * 3).to(dtype)
    weight = torch.randn(size)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    result, added = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert added is residual
    # The interpreter truncates to bfloat16, where GPUs round.
    exact = 2**-7 if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(added, total, atol=0, rtol=exact)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)


def test_norms_of_large_float16_values_do_not_overflow():
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    ones = torch.ones(64, dtype=torch.float16)
    torch.testing.assert_close(triton_norm.rms_norm(x, ones, 1e-5), ones[None])


def test_norms_that_do_not_fit_are_refused():
    x = torch.zeros(2, 64)
    with pytest.raises(ValueError, match=r"weight \(63,\) does not fit rows of 64"):
        triton_norm.rms_norm(x, torch.ones(63), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        triton_norm.rms_norm(x.t(), torch.ones(2), 1e-5)
    with pytest.raises(ValueError, match=r"residual \(1, 64\)"):
        triton_norm.add_rms_norm(x, x[:1], torch.ones(64), 1e-5)


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 72), (128, 32), (256, 256)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (1, 1), (7, 1)])
def test_rotary_agrees_in_place(dtype, atol, rtol, head_dim, rotary_dim, heads, kv_heads):
    qkv = torch.randn(3, heads + 2 * kv_heads, head_dim).to(dtype)
    before = qkv.clone()
    angles = torch.randn(3, rotary_dim // 2)
    views = [each.split([heads, kv_heads, kv_heads], dim=1) for each in (qkv, before)]
    (query, key, value), (old_query, old_key, old_value) = views
    result = triton_rotary.rotary(query, key, angles.cos(), angles.sin())
    assert result[0] is query
    assert result[1] is key
    expected = reference.rotary(old_query, old_key, angles.cos(), angles.sin())
    torch.testing.assert_close(query, expected[0], atol=atol, rtol=rtol)
    torch.testing.assert_close(key, expected[1], atol=atol, rtol=rtol)
    assert torch.equal(value, old_value)
    assert torch.equal(query[..., rotary_dim:], old_query[..., rotary_dim:])


def test_angles_beyond_the_head_are_refused():
    qkv = torch.zeros(1, 3, 64)
    with pytest.raises(ValueError, match="rotary_dim 66 is more than head_dim 64"):
        triton_rotary.rotary(qkv[:, :1], qkv[:, 1:2], torch.ones(1, 33), torch.ones(1, 33))


@overflows
@dtypes
@pytest.mark.parametrize("size", [1, 15, 1024, 1025, 1536])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gated_activations_agree(dtype, atol, rtol, size, name):
    gate_up = (torch.randn(3, 2 * size) * 20).to(dtype)
    before = gate_up.clone()
    result = getattr(triton_activation, name)(gate_up)
    expected = getattr(reference, name)(gate_up)
    torch.testing.assert_close(result, expected, atol=10 * atol, rtol=rtol)
    assert torch.equal(gate_up, before)


def test_no_rows_give_no_rows():
    assert triton_activation.silu_and_mul(torch.zeros(0, 8)).shape == (0, 4)
    with pytest.raises(ValueError, match=r"not \(1, 7\)"):
        triton_activation.gelu_and_mul(torch.zeros(1, 7))
