"""Gumbel noise from a counter: the same numbers for the same request, whatever the batch.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) in torch's
int64, with the same integers as Triton's `tl.philox`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from inferq.kernels.dispatch import runs_triton

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW_32 = 0xFFFFFFFF
_ROUNDS = 10
_LANES = 4

# Counters computed together: bounds the memory (1 MiB for each work tensor). [64, 49152] on 2 Zen 4
# cores: 99 ms with 2^12, 50 ms with 2^14, 26 ms with 2^16, 24 ms with 2^17.
_CHUNK_COUNTERS = 1 << 17


def gumbel_noise(
    seeds: Tensor,
    children: Tensor,
    positions: Tensor,
    token_ids: Tensor | None = None,
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Draw float32 noise [B, K] for token_ids [B, K], or [B, vocab_size] for every token.

    All arguments are int64; seeds, children and positions are [B]. A token's noise depends on
    nothing but its row's seed, child and position and on its own id.
    """
    if (token_ids is None) == (vocab_size is None):
        raise ValueError("give either token_ids or vocab_size")
    if runs_triton(seeds):
        return _triton_noise(seeds, children, positions, token_ids, vocab_size)
    if token_ids is not None:
        words = _words_of_tokens(seeds, children, positions, token_ids)
        return _to_gumbel(words)
    assert vocab_size is not None
    noise = torch.empty(seeds.shape[0], vocab_size, dtype=torch.float32, device=seeds.device)
    for rows, counters in _chunks(seeds.shape[0], -(-vocab_size // _LANES)):
        first = torch.arange(counters.start, counters.stop, device=seeds.device)
        lanes = philox(seeds[rows, None], first[None], positions[rows, None], children[rows, None])
        tokens = slice(counters.start * _LANES, min(counters.stop * _LANES, vocab_size))
        words = torch.stack(lanes, dim=-1).flatten(1)
        noise[rows, tokens] = _to_gumbel(words[:, : tokens.stop - tokens.start])
    return noise


def philox(
    seeds: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor | int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the four 32-bit words (in int64) of counters c0..c3 under 64-bit seeds.

    All arguments are int64 and broadcast; only the counters' low 32 bits count.
    """
    # Not broadcast_shapes: it imports sympy, a second or more at the first sampled token.
    shape = torch.broadcast_tensors(seeds, c0, c1, c2)[0].shape  # type: ignore[no-untyped-call]
    k0, k1 = seeds & _LOW_32, (seeds >> 32) & _LOW_32
    x0, x1 = (c0 & _LOW_32).expand(shape), c1 & _LOW_32
    x2, x3 = (c2 & _LOW_32).expand(shape), torch.as_tensor(c3 & _LOW_32, device=c0.device)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so their halves are the 32-bit high and low products.
        # Odd words stay unmasked: only their low halves reach the next round.
        product_a, product_b = x0 * _ROUND_A, x2 * _ROUND_B
        x0 = (product_b >> 32).bitwise_xor_(x1).bitwise_xor_(k0).bitwise_and_(_LOW_32)
        x2 = (product_a >> 32).bitwise_xor_(x3).bitwise_xor_(k1).bitwise_and_(_LOW_32)
        x1, x3 = product_b, product_a
        k0, k1 = (k0 + _KEY_A) & _LOW_32, (k1 + _KEY_B) & _LOW_32
    return x0, x1 & _LOW_32, x2, x3 & _LOW_32


def _triton_noise(
    seeds: Tensor,
    children: Tensor,
    positions: Tensor,
    token_ids: Tensor | None,
    vocab_size: int | None,
) -> Tensor:
    # Imported here: Triton may be absent. No int64 tensors as large as the noise.
    from inferq.kernels import triton_gumbel

    if token_ids is not None:
        return triton_gumbel.token_noise(seeds, children, positions, token_ids)
    assert vocab_size is not None
    return triton_gumbel.vocabulary_noise(seeds, children, positions, vocab_size)


def _words_of_tokens(
    seeds: Tensor, children: Tensor, positions: Tensor, token_ids: Tensor
) -> Tensor:
    lanes = philox(seeds[:, None], token_ids // _LANES, positions[:, None], children[:, None])
    stacked = torch.stack(lanes, dim=-1)  # [B, K, 4]
    return stacked.gather(2, (token_ids % _LANES)[..., None]).squeeze(2)


def _to_gumbel(words: Tensor) -> Tensor:
    """Map 32-bit words to -log(-log(u)).

    u = (word >> 9 + 1/2) / 2^23 is exact in float32 and never 0 or 1.
    """
    uniform = (words >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _chunks(rows: int, counters: int) -> Iterator[tuple[slice, range]]:
    """Split rows x counters into pieces of about _CHUNK_COUNTERS."""
    at_once = max(1, _CHUNK_COUNTERS // max(1, counters))
    for row in range(0, rows, at_once):
        for first in range(0, counters, _CHUNK_COUNTERS):
            last = min(first + _CHUNK_COUNTERS, counters)
            yield slice(row, min(row + at_once, rows)), range(first, last)
