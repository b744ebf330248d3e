"""GPTQ's layout against its definition, and turned into AWQ's."""

import pytest
import torch

from inferq.kernels.awq import AwqWeight, pack_awq_words, unpack_awq_words
from inferq.kernels.gptq import unpack_gptq
from inferq.kernels.matmul_int4 import dequantize_int4


@pytest.mark.parametrize("group", [32, 64, -1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("zero_offset", [0, 1])
def test_unpacked_weights_are_those_of_the_definition(gptq_packing, group, sym, zero_offset):
    weight = torch.randn(48, 128)
    packed = gptq_packing.pack_gptq(weight, group, sym=sym, zero_offset=zero_offset)
    expected = gptq_packing.dequantize_gptq(packed, zero_offset)
    values, zeros = unpack_gptq(packed.qweight, packed.qzeros, zero_offset)
    assert values.dtype == zeros.dtype == torch.uint8
    result = dequantize_int4(values, packed.scales.T, zeros, 128 if group == -1 else group)
    assert torch.equal(result, expected)
    # Half a step, and as much again where the zero was rounded too.
    step = packed.scales.float().max(0).values[:, None]
    assert ((result - weight).abs() <= step * 1.01).all()


def test_a_zero_of_sixteen_is_zero():
    """Packers that store 0 less one store 15."""
    qzeros = torch.tensor([[-1]], dtype=torch.int32)
    _, zeros = unpack_gptq(torch.zeros(4, 8, dtype=torch.int32), qzeros, 1)
    assert zeros.tolist() == [[0]] * 8


def test_words_of_awq_are_those_of_its_packer(pack_awq):
    packed = pack_awq(torch.randn(48, 64), 32)
    values = unpack_awq_words(packed.qweight)
    assert values.shape == (48, 64)
    assert int(values.max()) == 15
    assert torch.equal(pack_awq_words(values.T), packed.qweight)


def test_gptq_weights_multiply_as_awq(gptq_packing):
    packed = gptq_packing.pack_gptq(torch.randn(48, 64), 32, sym=False)
    values, zeros = unpack_gptq(packed.qweight, packed.qzeros, 1)
    words, zero_words = pack_awq_words(values.T), pack_awq_words(zeros.T)
    weight = AwqWeight(words, zero_words, packed.scales, 32)
    wide, bias = torch.randn(5, 100), torch.randn(48)
    x = wide[:, 7:71]
    expected = x @ gptq_packing.dequantize_gptq(packed).T + bias
    torch.testing.assert_close(weight.multiply(x, bias), expected, atol=1e-4, rtol=1e-5)
    strided = x.T.contiguous().T
    torch.testing.assert_close(weight.multiply(strided, bias), expected, atol=1e-4, rtol=1e-5)
    assert weight.nbytes == 64 * 48 // 2 + 2 * 48 // 2 + 2 * 48 * 2
