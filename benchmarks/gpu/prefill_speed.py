"""Section: prefill attention as a share of the matrix rate, and beside torch's own attention."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu.paged_case import LLAMA, Heads, batch_of, shuffled_tables
from gpu.records import Quantity, Record
from gpu.section import Case, Settings, each
from gpu.timing import matrix_rate, normal, stream_seconds
from inferq.kernels.triton_attention import TritonAttention, Tuning

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BLOCK_SIZE = 16
#: Tokens of the calls that are timed together.
_TOKENS_TOGETHER = 16384


class Rates:
    """What the device reaches, measured once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @cached_property
    def matrix(self) -> float:
        """Operations per second of a matrix product."""
        return matrix_rate(self._settings)


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: whole prompts with torch's beside, ragged and mixed batches, a prefix."""
    rates = Rates(settings)
    heads = Heads(4, 2, 64) if settings.smoke else LLAMA
    for length in (20, 33) if settings.smoke else LENGTHS:
        name = f"length {length}"

        def whole(name: str = name, length: int = length) -> Iterator[Record]:
            yield measure(name, [(0, length)], heads, rates, settings)
            yield from _peers(name, length, heads, rates, settings)

        yield Case(name, whole)
    scale = 64 if settings.smoke else 1
    rng = random.Random(0)
    ragged = [(0, rng.randrange(100, 4000) // scale) for _ in range(2 if settings.smoke else 16)]
    prefix = [(8192 // scale, 1024 // scale)] * (1 if settings.smoke else 4)
    decodes = [(4096 // scale, 1)] * (2 if settings.smoke else 64)
    batches = {
        f"{len(ragged)} ragged prompts": ragged,
        f"{len(prefix)} prompts of {prefix[0][1]} after {prefix[0][0]} cached": prefix,
        f"{len(decodes)} decodes and a prompt of {2048 // scale}": [*decodes, (0, 2048 // scale)],
    }
    for name, sequences in batches.items():
        yield each(name, partial(measure, name, sequences, heads, rates, settings))
    length, window = (40, 9) if settings.smoke else (16384, 4096)
    name = f"length {length}, window {window}"
    yield each(name, lambda: measure(name, [(0, length)], heads, rates, settings, window=window))


def measure(
    name: str,
    sequences: Sequence[tuple[int, int]],
    heads: Heads,
    rates: Rates,
    settings: Settings,
    *,
    window: int | None = None,
    tuning: Tuning | None = None,
) -> Record:
    """Time the attention of sequences of (cached, new) tokens."""
    tables, blocks = shuffled_tables(sequences, BLOCK_SIZE, settings.device)
    batch = batch_of(sequences, tables, BLOCK_SIZE)
    kv = normal(settings, blocks, 1, 2, BLOCK_SIZE, heads.kv, heads.dim)
    tokens = sum(batch.query_lens)
    query = normal(settings, tokens, heads.query, heads.dim)
    ops = TritonAttention(settings.device, tuning)
    plan = ops.plan(batch)
    attend = partial(ops.attend, query, kv[:, 0], plan, scale=heads.dim**-0.5, window=window)
    seconds = stream_seconds([attend] * _calls(tokens, settings), settings)
    return Record(name, _rate(seconds, sequences, heads, rates, window))


def _calls(tokens: int, settings: Settings) -> int:
    return 1 if settings.smoke else max(2, _TOKENS_TOGETHER // tokens)


def _rate(
    seconds: float,
    sequences: Sequence[tuple[int, int]],
    heads: Heads,
    rates: Rates,
    window: int | None = None,
) -> dict[str, Quantity]:
    pairs = sum(_pairs(context, new, window) for context, new in sequences)
    operations = 4 * pairs * heads.query * heads.dim
    return {
        "time": Quantity(seconds * 1e6, "us"),
        "rate": Quantity(operations / seconds / 1e12, "TFLOP/s"),
        "share": Quantity(operations / seconds / rates.matrix, "of the matrix rate"),
    }


def _pairs(context: int, new: int, window: int | None) -> int:
    """Count pairs of a query row and a key that it sees."""
    if window is None:
        return new * context + new * (new + 1) // 2
    return sum(min(context + row + 1, window) for row in range(new))


def _peers(
    name: str, length: int, heads: Heads, rates: Rates, settings: Settings
) -> Iterator[Record]:
    """Time torch's attention over contiguous keys and values of the same sizes."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if settings.smoke:
        backends = {"math": SDPBackend.MATH}
    query, key, value = (
        torch.randn(1, heads.query, length, heads.dim, dtype=settings.dtype, device=settings.device)
        for _ in range(3)
    )
    for label, backend in backends.items():
        peer = f"{name}: torch {label}"
        call = _sdpa(backend, query, key, value)
        try:
            seconds = stream_seconds([call] * _calls(length, settings), settings)
        except RuntimeError as error:  # a backend that this build does not have
            yield Record(peer, note=f"not available: {error}".splitlines()[0])
            continue
        yield Record(peer, _rate(seconds, [(0, length)], heads, rates))


def _sdpa(
    backend: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Callable[[], object]:
    def call() -> object:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sdpa_kernel(backend))
            return scaled_dot_product_attention(query, key, value, is_causal=True)

    return call
