import pytest
import torch

from inferq.kernels.awq import awq_dequantize, awq_linear

GROUPS = [32, 64, 128, -1]


@pytest.mark.parametrize("group", GROUPS)
def test_packed_weights_come_back_within_half_a_step(pack_awq, group):
    weight = torch.randn(48, 256)
    packed = pack_awq(weight, group, torch.float32)
    result = awq_dequantize(packed.qweight, packed.qzeros, packed.scales, group)
    assert result.shape == (256, 48)
    steps = packed.scales.repeat_interleave(256 // packed.scales.shape[0], dim=0)
    # Half a step, and as much again where the zero was rounded too.
    assert ((result - weight.t()).abs() <= steps * 1.001).all()


def test_a_word_holds_its_columns_in_the_published_order():
    """Column c's bits are at 4 * (0, 4, 1, 5, 2, 6, 3, 7)[c] (AutoAWQ's AWQ_REVERSE_ORDER)."""
    word = sum(column << (4 * place) for column, place in enumerate([0, 4, 1, 5, 2, 6, 3, 7]))
    qweight = torch.tensor([[word]]).to(torch.int32).expand(32, 1).contiguous()
    qzeros = torch.tensor([[0x11111111]], dtype=torch.int32)
    scales = torch.full((1, 8), 0.5)
    result = awq_dequantize(qweight, qzeros, scales, 32)
    assert result[0].tolist() == [(column - 1) * 0.5 for column in range(8)]


def test_the_weights_take_the_dtype_that_is_asked_for(pack_awq):
    packed = pack_awq(torch.randn(16, 64), 32)
    arguments = (packed.qweight, packed.qzeros, packed.scales, 32)
    assert awq_dequantize(*arguments).dtype == torch.float16
    assert awq_dequantize(*arguments, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_product_is_that_of_the_dequantized_weights(pack_awq):
    packed = pack_awq(torch.randn(16, 64), 32)
    arguments = (packed.qweight, packed.qzeros, packed.scales, 32)
    x = torch.randn(3, 64)
    expected = x @ awq_dequantize(*arguments, dtype=torch.float32)
    torch.testing.assert_close(awq_linear(x, *arguments), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "groups", "outputs", "inputs", "group", "message"),
    [
        (2, 2, 20, 64, 32, "2 words of 8 weights do not hold 20 outputs"),
        (2, 2, 16, 64, 48, "groups of 48 inputs are not supported"),
        (2, 2, 16, 72, 32, "72 inputs are no multiple of the group size 32"),
        (2, 3, 16, 64, 32, r"2 groups of 32 inputs need scales \[2, 16\]"),
        (2, 1, 16, 60, -1, "60 inputs are no multiple of 8"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    words, groups, outputs, inputs, group, message
):
    qweight = torch.zeros(inputs, words, dtype=torch.int32)
    qzeros = torch.zeros(groups, words, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        awq_dequantize(qweight, qzeros, torch.ones(groups, outputs), group)


def test_inputs_of_another_size_are_refused(pack_awq):
    packed = pack_awq(torch.randn(16, 64), 32)
    with pytest.raises(ValueError, match=r"x \(3, 65\) does not fit 64 inputs"):
        awq_linear(torch.zeros(3, 65), packed.qweight, packed.qzeros, packed.scales, 32)
