"""Ragged batches over a poisoned paged cache, for every form of attention."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import pytest
import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch, AttentionOps
from inferq.kernels.reference import ReferenceAttention

# Triton reads TRITON_INTERPRET when a kernel is defined: these run in a process of their own,
# started by test_triton_interpreted.py.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]

# (context tokens, new tokens) of each sequence. (-1, 1): a padding row, with slot -1.
Sequences = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PagedCase:
    """A batch, its cache, and what the reference makes of them."""

    batch: AttentionBatch
    kv: Tensor  # [blocks, layers, 2, block_size, kv_heads, head_dim]; NaN where nothing is stored
    query: Tensor  # [T, heads, head_dim], a view of the fused projection
    key: Tensor
    value: Tensor
    scale: float

    def run(
        self, ops: AttentionOps, *, window: int | None = None, soft_cap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write, then attend in layer 1; gives the output and the whole cache."""
        kv = self.kv.clone()
        layer = kv[:, 1]
        plan = ops.plan(self.batch)
        ops.write_kv(self.key, self.value, layer, plan)
        output = ops.attend(
            self.query, layer, plan, scale=self.scale, window=window, soft_cap=soft_cap
        )
        return output, kv

    def assert_agrees(
        self,
        ops: AttentionOps,
        *,
        atol: float,
        window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Assert that a form writes the same cache as the reference and attends alike."""
        expected, expected_kv = self.run(ReferenceAttention(), window=window, soft_cap=soft_cap)
        output, kv = self.run(ops, window=window, soft_cap=soft_cap)
        assert not expected.isnan().any()
        assert output.dtype == self.query.dtype
        torch.testing.assert_close(kv, expected_kv, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(output, expected, rtol=0, atol=atol)


MakeCase = Callable[..., PagedCase]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep the reference's many tiny products from waiting for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_case() -> MakeCase:
    return build_case


def build_case(
    sequences: Sequences,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> PagedCase:
    """Scatter the sequences over shuffled blocks; whatever holds no token of theirs is NaN."""
    generator = torch.Generator().manual_seed(0)
    totals = [context + new for context, new in sequences]
    pages = [-(-total // block_size) for total in totals]
    blocks = torch.randperm(sum(pages) + 3, generator=generator)
    kv = torch.full((len(blocks), 2, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    tables = torch.full((len(sequences), max([*pages, 1])), int(blocks[-1]), dtype=torch.int32)
    slots: list[Tensor] = []
    for index, (context, new) in enumerate(sequences):
        used = blocks[sum(pages[:index]) :][: pages[index]]
        tables[index, : pages[index]] = used
        if totals[index] <= 0:
            slots.append(torch.full((new,), -1))
            continue
        places = (used[:, None] * block_size + torch.arange(block_size)).flatten()
        slots.append(places[context : totals[index]])
        stored = torch.randn(context, 2, kv_heads, head_dim, generator=generator).to(dtype)
        kv[places[:context] // block_size, 1, :, places[:context] % block_size] = stored
    new_tokens = [new for _, new in sequences]
    qkv = torch.randn(sum(new_tokens), heads + 2 * kv_heads, head_dim, generator=generator)
    query, key, value = qkv.to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *new_tokens]).cumsum(0).int(),
        seq_lens=torch.tensor(totals, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        num_decodes=len(list(takewhile(lambda new: new == 1, new_tokens))),
        query_lens=tuple(new_tokens),
        context_lens=tuple(context for context, _ in sequences),
        block_size=block_size,
    )
    return PagedCase(batch, kv, query, key, value, scale=head_dim**-0.5)
