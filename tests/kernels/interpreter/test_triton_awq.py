import pytest
import torch

from inferq.kernels import reference, triton_awq

# fp16 and bf16: the product's one rounding to the type. The interpreter truncates to bfloat16,
# weights included.
ATOL = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.5}
DTYPES = pytest.mark.parametrize(("dtype", "atol"), ATOL.items(), ids=lambda value: str(value))
# (inputs, outputs, group): outputs that end within a tile, inputs that do within a step.
SHAPES = [(64, 8, 32), (192, 136, 64), (256, 24, 128), (200, 72, -1), (40, 8, -1)]


@pytest.fixture
def packed(pack_awq):
    def pack(inputs, outputs, group):
        weight = torch.randn(
            outputs, inputs, generator=torch.Generator().manual_seed(inputs + outputs)
        )
        made = pack_awq(weight, group)
        return made.qweight, made.qzeros, made.scales, inputs if group == -1 else group

    return pack


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dequantized_weights_are_the_references(packed, shape, dtype):
    arguments = packed(*shape)
    result = triton_awq.dequantize(*arguments, dtype)
    assert torch.equal(result, reference.awq_dequantize(*arguments, dtype))


def test_dequantized_bfloat16_weights_are_near_the_references(packed):
    arguments = packed(64, 24, 32)
    result = triton_awq.dequantize(*arguments, torch.bfloat16)
    expected = reference.awq_dequantize(*arguments, torch.bfloat16)
    torch.testing.assert_close(result, expected, atol=0, rtol=2**-7)


def assert_product(x, arguments, atol):
    weights = reference.awq_dequantize(*arguments, x.dtype)
    expected = (x.float() @ weights.float()).to(x.dtype)
    result = triton_awq.gemm(x, *arguments)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result, expected, atol=atol, rtol=0)
    return result


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree(packed, dtype, atol, shape):
    x = torch.randn(5, shape[0]).to(dtype)
    assert_product(x, packed(*shape), atol)


@pytest.mark.parametrize("tokens", [1, 16, 17, 33, 65])
def test_products_of_every_number_of_rows_agree(packed, tokens):
    x = torch.randn(tokens, 2 * 128)[:, :128]  # rows of a wider matrix
    assert_product(x, packed(128, 24, 64), ATOL[torch.float32])


@pytest.mark.parametrize("group", [128, -1])
def test_splits_of_the_inputs_add_up_and_always_alike(packed, monkeypatch, group):
    monkeypatch.setattr(triton_awq, "_MIN_SPLIT", 128)
    monkeypatch.setattr(triton_awq, "_device", lambda device: (8, 64))
    x = torch.randn(3, 640)
    arguments = packed(640, 24, group)
    first = assert_product(x, arguments, 2e-4)
    assert torch.equal(first, triton_awq.gemm(x, *arguments))


@pytest.mark.parametrize(
    ("inputs", "tiles", "programs", "expected"),
    [
        (4096, 32, 264, (512, 8)),
        (4096, 300, 264, (4096, 1)),
        (576, 5, 264, (384, 2)),
        (100, 1, 264, (128, 1)),
        (14336, 32, 264, (1792, 8)),
    ],
)
def test_splits_fill_the_device_without_cutting_a_group(inputs, tiles, programs, expected):
    length, splits = triton_awq.split_inputs(inputs, tiles, programs)
    assert (length, splits) == expected
    assert length % 128 == 0
    assert (splits - 1) * length < inputs <= splits * length


def test_no_rows_are_no_work(packed):
    assert triton_awq.gemm(torch.zeros(0, 64), *packed(64, 8, 32)).shape == (0, 8)
