"""Matrix products against float64, in every form that the machine has."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inferq.kernels import matmul, matmul_int4, matmul_int8
from inferq.kernels.huge_pages import HugePages
from inferq.kernels.native import compiler, library
from inferq.kernels.native.library import NativeLibrary, load_native

MODULES = (matmul, matmul_int8, matmul_int4)
#: The forms of our own: of this machine, and of other instruction sets.
OUR_FORMS = ("native", "x86-64", "x86-64-v3", "x86-64-v4")
#: Inputs and outputs: around a panel, a step and a group; one of each; SmolLM2's.
SHAPES = [(576, 96), (33, 17), (1, 1), (64, 49), (130, 64), (2052, 40)]
#: Around a tile; shared out by rows, in one piece and, with 2052 inputs, in several.
ROWS = (1, 2, 3, 5, 8, 14, 15, 29, 61, 130)
#: Relative to the norm of the result: half a unit in the last place of each dtype, and sums.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def _torch_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "native_function", lambda *_: None)


@pytest.fixture(scope="session")
def other_machines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], NativeLibrary]:
    """Compile the products for another x86 instruction set that this machine runs too."""
    folder = tmp_path_factory.mktemp("native")

    def build(march: str) -> NativeLibrary:
        path = folder / f"{march}.so"
        if not path.exists():
            toolchain = compiler.Toolchain.find(library._openmp_runtime())
            flags = [*compiler._FLAGS, "-O1", f"-march={march}", "-shared", "-o", str(path)]
            sources = sorted(map(str, compiler.SOURCES.glob("matmul_*.cpp")))
            compiler._run([*toolchain.command, *flags, *sources, str(toolchain.runtime)])
        return NativeLibrary(path)

    return build


@pytest.fixture(params=["torch", *OUR_FORMS])
def form(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    other_machines: Callable[[str], NativeLibrary],
) -> str:
    """Make the products run in one form: torch's, ours, or ours for other instruction sets."""
    name: str = request.param
    if name == "torch":
        _torch_forms(monkeypatch)
    elif load_native() is None:
        pytest.skip("no native kernels here")
    elif name != "native":
        if platform.machine() != "x86_64" or (name[-2:] == "v4" and not _has_avx512()):
            pytest.skip("not this machine's instructions")
        built = other_machines(name)
        for module in MODULES:
            monkeypatch.setattr(module, "native_function", built.function)
    return name


def _has_avx512() -> bool:
    return "avx512vl" in Path("/proc/cpuinfo").read_text()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def _error(result: Tensor, expected: Tensor) -> float:
    difference = (result.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    return difference.item()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_float_product_is_right_to_its_rounding(form: str, dtype: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs).to(dtype)
        bias = torch.randn(outputs).to(dtype)
        packed = matmul.pack_float(weight, HugePages())
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            expected = x.double() @ weight.double().T + bias.double()
            result = packed.multiply(x, bias)
            assert result.dtype == dtype
            assert _error(result, expected) < ROUNDING[dtype], (inputs, outputs, rows)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_16_bit_weight_meets_float32_without_rounding(form: str, narrow: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        weight, bias = torch.randn(outputs, inputs).to(narrow), torch.randn(outputs)
        packed = matmul.pack_float(weight, HugePages(), torch.float32)
        if form != "torch":
            assert packed.nbytes < 2 * (outputs + 32) * inputs + 1, "half of float32's"
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            expected = x.double() @ weight.double().T + bias.double()
            result = packed.multiply(x, bias)
            assert result.dtype == torch.float32
            assert _error(result, expected) < ROUNDING[torch.float32], (inputs, outputs, rows)
        if isinstance(packed, matmul.ReadableWeight):
            indices = torch.randint(outputs, (5,))
            assert torch.equal(packed.rows(indices), weight[indices].float())


@pytest.mark.parametrize("form", OUR_FORMS, indirect=True)  # torch's differ by batch size
def test_a_rows_result_is_the_same_in_every_batch(form: str) -> None:
    x = torch.randn(430, 576)
    for pack in (matmul.pack_float, matmul_int8.pack_int8):
        packed = pack(torch.randn(96, 576), HugePages())
        whole = packed.multiply(x, None)
        for first, last in ((0, 1), (3, 17), (28, 29), (200, 270), (429, 430)):
            assert torch.equal(packed.multiply(x[first:last], None), whole[first:last])


def test_strided_rows_and_no_rows(form: str) -> None:
    wide = torch.randn(5, 200)
    for pack in (matmul.pack_float, matmul_int8.pack_int8):
        packed = pack(torch.randn(40, 96), HugePages())
        dense = packed.multiply(wide[:, 7:103].contiguous(), None)
        assert torch.equal(packed.multiply(wide[:, 7:103], None), dense)
        assert torch.equal(packed.multiply(wide[:, 7:103].T.contiguous().T, None), dense)
        assert packed.multiply(torch.empty(0, 96), None).shape == (0, 40)


def test_rows_of_a_packed_weight_are_read_back(form: str) -> None:
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs)
        indices = torch.randint(outputs, (11,))
        exact = matmul.pack_float(weight, HugePages())
        if isinstance(exact, matmul.ReadableWeight):
            assert torch.equal(exact.rows(indices), weight[indices])
        else:
            assert form == "torch"
        rounded = matmul_int8.pack_int8(weight, HugePages()).rows(indices)
        assert rounded.is_contiguous()
        steps = weight.abs().amax(1)[indices, None] / 127
        assert ((rounded - weight[indices]).abs() <= steps * 0.5001).all()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_an_int8_product_is_that_of_the_rounded_factors(form: str, dtype: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        weight, bias = torch.randn(outputs, inputs), torch.randn(outputs).to(dtype)
        packed = matmul_int8.pack_int8(weight.to(dtype), HugePages())
        factors = packed.rows(torch.arange(outputs)) if dtype == torch.float32 else None
        for rows in ROWS:
            x = _clear_of_halves(torch.randn(rows, inputs)).to(dtype)
            result = packed.multiply(x, bias)
            exact = x.double() @ weight.double().T + bias.double()
            # Two factors rounded to 1 in 127 of the largest of tens to hundreds.
            assert _error(result, exact) < 0.02 + ROUNDING[dtype], (inputs, outputs, rows)
            if factors is not None:
                expected = _rounded_by_groups(x) @ factors.double().T + bias.double()
                assert _error(result, expected) < 1e-5, (inputs, outputs, rows)


def _clear_of_halves(x: Tensor) -> Tensor:
    """Return `x` without what the last bit of a group's scale would round up or down."""
    parts = []
    for part in x.split(matmul_int8.GROUP, dim=1):
        steps = part.double() * (127 / part.double().abs().amax(1, keepdim=True))
        parts.append(torch.where((steps - steps.floor() - 0.5).abs() < 1e-4, 0.0, part))
    return torch.cat(parts, dim=1)


def _rounded_by_groups(x: Tensor) -> Tensor:
    parts = []
    for part in x.split(matmul_int8.GROUP, dim=1):
        values, scales = matmul_int8.quantize_rows(part)
        parts.append(values.double() * scales.double())
    return torch.cat(parts, dim=1)


def test_int8_takes_zeros_and_extremes(form: str) -> None:
    weight = torch.tensor([[127.0, -127.0, 127.0, -127.0] * 64, [0.0] * 256])
    packed = matmul_int8.pack_int8(weight, HugePages())
    x = torch.stack([torch.zeros(256), torch.tensor([1.0, -1.0] * 128), torch.full((256,), -3e38)])
    result = packed.multiply(x, None)
    assert result[0].tolist() == [0, 0]
    assert result[1].tolist() == pytest.approx([256 * 127, 0])
    assert result[2].tolist() == [0, 0]


INT4_SHAPES = [(576, 96, 64), (64, 17, 32), (256, 40, 128), (96, 33, -1), (12, 3, -1), (12, 5, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int4_product_is_close_to_the_dequantized_one(form: str, dtype: torch.dtype) -> None:
    for inputs, outputs, group in INT4_SHAPES:
        values, scales, zeros = _int4(inputs, outputs, group)
        weight = matmul_int4.dequantize_int4(values, scales, zeros, group)
        packed = matmul_int4.pack_int4(values, scales, zeros, group)
        bias = torch.randn(outputs).to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, inputs).to(dtype)
            result = matmul_int4.linear_int4(x, packed, bias)
            assert result.dtype == dtype
            expected = x.double() @ weight.double().T + bias.double()
            # Activations in 8 bits by groups; or, in torch's form, bfloat16 throughout.
            assert _error(result, expected) < 0.015, (inputs, outputs, group, rows)


def test_an_int4_product_takes_less_than_a_sixth_of_float32(form: str) -> None:
    packed = matmul_int4.pack_int4(*_int4(576, 960, 64), 64)
    assert packed.nbytes < 960 * 576 * 4 / 6


def _int4(inputs: int, outputs: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = 1 if group == -1 else inputs // group
    values = torch.randint(0, 16, (outputs, inputs))
    return values, torch.rand(outputs, groups) + 0.5, torch.randint(0, 16, (outputs, groups))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, s, z: (v, s, z, 48), "groups of 48"),
        (lambda v, s, z: (v, s[:, :1], z, 32), "scales have shape"),
        (lambda v, s, z: (v, s, z[:3], 32), "zeros have shape"),
        (lambda v, s, z: (v + 1, s, z, 32), "values are not all from 0 to 15"),
        (lambda v, s, z: (v, s, z - 1, 32), "zeros are not all from 0 to 15"),
    ],
)
def test_int4_parts_that_do_not_fit_are_refused(
    change: Callable[..., tuple[Tensor, Tensor, Tensor, int]], message: str
) -> None:
    values, scales, zeros = _int4(64, 4, 32)
    values[0, 0], zeros[0, 0] = 15, 0
    with pytest.raises(ValueError, match=message):
        matmul_int4.pack_int4(*change(values, scales, zeros))


def test_another_dtype_than_the_weights_is_refused(form: str) -> None:
    packed = matmul_int8.pack_int8(torch.randn(8, 8), HugePages())
    with pytest.raises(TypeError, match="float32"):
        packed.multiply(torch.randn(2, 8, dtype=torch.bfloat16), None)


def test_huge_pages_hand_out_separate_aligned_tensors() -> None:
    memory = HugePages()
    first = memory.empty((3, 5), torch.float32).fill_(1)
    second = memory.empty(((1 << 24) + 1,), torch.float32).fill_(2)  # more than a chunk
    third = memory.empty((7,), torch.bfloat16).fill_(3)
    del memory
    assert [t.data_ptr() % 64 for t in (first, second, third)] == [0, 0, 0]
    assert (first.unique().item(), second.unique().item(), third.unique().item()) == (1, 2, 3)


def test_without_huge_pages_tensors_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert HugePages().empty((2, 3), torch.float32).shape == (2, 3)
