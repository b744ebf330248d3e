import pytest
import torch

from inferq.kernels import reference
from inferq.kernels.activation import silu_and_mul
from inferq.kernels.norm import rms_norm
from inferq.kernels.rotary import rotary

# float32: the order of additions; the others: one more rounding than the reference.
TOLERANCES = [
    pytest.param(torch.float32, 1e-6, 1e-6, id="float32"),
    pytest.param(torch.float16, 1e-3, 2e-3, id="float16"),
    pytest.param(torch.bfloat16, 1e-2, 1.6e-2, id="bfloat16"),
]
dtypes = pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (7, 63), (3, 9, 64), (0, 576)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm_agrees_with_the_reference(dtype, atol, rtol, shape, weight_dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(weight_dtype or dtype)
    result = rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)


def test_rms_norm_of_large_float16_values_does_not_overflow():
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    result = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(result, torch.ones(1, 64, dtype=torch.float16))


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tokens", [1, 17])
def test_rotary_agrees_with_the_reference(dtype, atol, rtol, head_dim, tokens):
    qkv = torch.randn(tokens, 15, head_dim).to(dtype)  # query and key are views
    angles = torch.randn(tokens, head_dim // 2)
    arguments = (qkv[:, :9], qkv[:, 9:12], angles.cos(), angles.sin())
    for result, expected in zip(rotary(*arguments), reference.rotary(*arguments), strict=True):
        torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)


def test_rotary_rotates_the_pairs_of_the_two_halves():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter, none = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    query, key = rotary(x, x, quarter, none)  # channels 0 and 2 by 90 degrees, 1 and 3 by none
    torch.testing.assert_close(query, torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))
    torch.testing.assert_close(key, query)


@dtypes
@pytest.mark.parametrize("shape", [(1, 3072), (5, 30), (0, 8)])
def test_silu_and_mul_agrees_with_the_reference(dtype, atol, rtol, shape):
    gate_up = (torch.randn(shape) * 2).to(dtype)
    before = gate_up.clone()
    expected = reference.silu_and_mul(gate_up)
    torch.testing.assert_close(silu_and_mul(gate_up), expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(gate_up, before, rtol=0, atol=0)
