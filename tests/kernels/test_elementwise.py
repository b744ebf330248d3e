import pytest
import torch

from inferq.kernels import reference
from inferq.kernels.activation import gelu_and_mul, silu_and_mul
from inferq.kernels.dispatch import runs_triton
from inferq.kernels.native.library import load_native
from inferq.kernels.norm import add_rms_norm, rms_norm
from inferq.kernels.rotary import rotary

# float32: the order of additions; the others: one more rounding than the reference.
TOLERANCES = [
    pytest.param(torch.float32, 1e-6, 1e-6, id="float32"),
    pytest.param(torch.float16, 1e-3, 2e-3, id="float16"),
    pytest.param(torch.bfloat16, 1e-2, 1.6e-2, id="bfloat16"),
]
dtypes = pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)


@pytest.fixture(params=["torch", "native"], autouse=True)
def form(request, monkeypatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr("inferq.kernels.dispatch.native_function", lambda *_: None)
    elif load_native() is None:
        pytest.skip("no native kernels here")
    return request.param


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (7, 63), (40, 1536), (3, 9, 64), (0, 576)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_rms_norm_agrees_with_the_reference(dtype, atol, rtol, shape, weight_dtype):
    x = (torch.randn(shape) * 3).to(dtype)
    weight = torch.randn(shape[-1]).to(weight_dtype or dtype)
    result = rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)


def test_rms_norm_of_heads_within_the_fused_projection_agrees():
    key = torch.randn(5, 15, 96)[:, 9:12]
    result = rms_norm(key, torch.ones(96), 1e-6)
    assert result.is_contiguous() or result.stride() == key.stride()
    torch.testing.assert_close(result, reference.rms_norm(key, torch.ones(96), 1e-6))


def test_rms_norm_of_large_float16_values_does_not_overflow():
    x = torch.full((1, 64), 3e4, dtype=torch.float16)
    result = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5)
    torch.testing.assert_close(result, torch.ones(1, 64, dtype=torch.float16))


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (7, 63), (40, 1536), (0, 64)])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_add_rms_norm_agrees_with_the_reference(dtype, atol, rtol, shape, weight_dtype):
    x, residual = torch.randn(2, *shape).to(dtype).unbind()
    weight = torch.randn(shape[-1]).to(weight_dtype or dtype)
    expected, expected_sum = reference.add_rms_norm(x, residual, weight, 1e-5)
    before = x.clone()
    result, total = add_rms_norm(x, residual.clone(), weight, 1e-5)
    torch.testing.assert_close(total, expected_sum, rtol=0, atol=0)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 32), (128, 128), (256, 256), (20, 10)]
)
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_rotary_agrees_with_the_reference(dtype, atol, rtol, head_dim, rotary_dim, tokens):
    qkv = torch.randn(tokens, 15, head_dim).to(dtype)  # query and key are views
    angles = torch.randn(tokens, rotary_dim // 2)
    expected = reference.rotary(qkv[:, :9], qkv[:, 9:12], angles.cos(), angles.sin())
    value = qkv[:, 12:].clone()
    results = rotary(qkv[:, :9], qkv[:, 9:12], angles.cos(), angles.sin())
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=atol, rtol=rtol)
    torch.testing.assert_close(qkv[:, 12:], value, rtol=0, atol=0)


def test_rotary_rotates_the_pairs_of_the_two_halves():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    quarter, none = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    # channels 0 and 2 by 90 degrees, 1 and 3 by none
    query, key = rotary(x.clone(), x.clone(), quarter, none)
    torch.testing.assert_close(query, torch.tensor([[[-3.0, 2.0, 1.0, 4.0]]]))
    torch.testing.assert_close(key, query)


@dtypes
@pytest.mark.parametrize("shape", [(1, 3072), (5, 30), (40, 3072), (0, 8)])
@pytest.mark.parametrize("operation", [silu_and_mul, gelu_and_mul])
def test_gated_activations_agree_with_the_reference(dtype, atol, rtol, shape, operation):
    gate_up = (torch.randn(shape) * 2).to(dtype)
    before = gate_up.clone()
    expected = getattr(reference, operation.__name__)(gate_up)
    torch.testing.assert_close(operation(gate_up), expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(gate_up, before, rtol=0, atol=0)


@pytest.mark.parametrize("operation", [silu_and_mul, gelu_and_mul])
def test_gates_far_from_zero_neither_overflow_nor_vanish(operation):
    gate_up = torch.tensor([[-3e38, -200.0, -89.0, 89.0, 200.0, 3e4, 1.0, 1.0] + 8 * [1.0]])
    expected = torch.tensor([[0.0, 0.0, 0.0, 89.0, 200.0, 3e4]])
    torch.testing.assert_close(operation(gate_up)[:, :6], expected, rtol=1e-6, atol=1e-30)


def test_triton_runs_on_cuda_only_and_only_where_it_is_installed(monkeypatch):
    class OnCuda:
        is_cuda = True

    assert not runs_triton(torch.zeros(1))
    monkeypatch.setattr("inferq.kernels.dispatch._has_triton", lambda: False)
    assert not runs_triton(OnCuda())
    monkeypatch.setattr("inferq.kernels.dispatch._has_triton", lambda: True)
    assert runs_triton(OnCuda())
