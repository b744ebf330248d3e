"""The native product of adapters: each row meets its own matrices, in all dtypes and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferq.kernels.lora import pack_lora
from inferq.kernels.native.library import load_native

pytestmark = pytest.mark.skipif(load_native() is None, reason="no native kernels here")


def reference(
    out: Tensor,
    x: Tensor,
    adapters: list[int],
    down: Tensor,
    ups: list[tuple[int, Tensor]],
    ranks: list[int],
) -> Tensor:
    """Compute row by row in float64."""
    total = out.double()
    for row, adapter in enumerate(adapters):
        if adapter == 0:
            continue
        start = sum(ranks[: adapter - 1])
        own = slice(start, start + ranks[adapter - 1])
        for part, (first, up) in enumerate(ups):
            a = down.view(len(ups), sum(ranks), -1)[part, own].double()
            inner = a @ x[row].double()
            total[row, first : first + len(up)] += up[:, own].double() @ inner
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("inputs", "parts", "ranks"),
    [
        (64, [(0, 48)], [4]),
        (576, [(0, 576), (576, 192), (768, 192)], [16, 16, 16, 16]),
        (70, [(0, 5), (25, 33)], [1, 7, 64, 3]),
        (3, [(2, 1)], [2, 5]),
    ],
)
@pytest.mark.parametrize("rows", [0, 1, 5, 37])
def test_rows_get_what_their_own_adapter_makes(
    dtype: torch.dtype, inputs: int, parts: list[tuple[int, int]], ranks: list[int], rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows + inputs)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    down = random(len(parts) * sum(ranks), inputs) / inputs**0.5
    ups = [(first, random(size, sum(ranks))) for first, size in parts]
    outputs = max(first + size for first, size in parts) + 3
    out, x = random(rows, outputs), random(rows, inputs + 5)[:, 2 : inputs + 2]
    adapters = torch.randint(0, len(ranks) + 1, (rows,), generator=generator)
    expected = reference(out, x, adapters.tolist(), down, ups, ranks)
    before = out.clone()
    lora = pack_lora(down, ups, ranks)
    assert lora is not None
    assert lora.add(out, x, adapters) is out
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(out.double(), expected, atol=10 * tolerance, rtol=tolerance)
    assert torch.equal(out[adapters == 0], before[adapters == 0]), "rows of the base model"


def test_a_row_does_not_depend_on_the_others() -> None:
    ranks, parts = [8, 16], [(0, 40), (40, 24)]
    down = torch.randn(2 * 24, 100)
    lora = pack_lora(down, [(first, torch.randn(size, 24)) for first, size in parts], ranks)
    assert lora is not None
    x, adapters = torch.randn(11, 100), torch.tensor([1, 2, 0, 2, 2, 1, 1, 1, 0, 2, 1])
    together = lora.add(torch.zeros(11, 64), x, adapters)
    x[3:5] = torch.nan
    beside_broken = lora.add(torch.zeros(11, 64), x, adapters)
    for row in (0, 1, 2, 5, 6, 7, 8, 9, 10):
        alone = lora.add(torch.zeros(1, 64), x[row : row + 1], adapters[row : row + 1])
        assert torch.equal(together[row], alone[0])
        assert torch.equal(together[row], beside_broken[row])


def test_other_dtypes_have_no_native_form() -> None:
    assert pack_lora(torch.zeros(4, 8, dtype=torch.float64), [(0, torch.zeros(8, 4))], [4]) is None
