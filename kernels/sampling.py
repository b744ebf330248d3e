"""Sampling of a batch of tokens on the device that has the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from inferq.kernels import reference
from inferq.kernels.dispatch import runs_triton

#: Probabilities are summed as integers in units of 2^-40 of the most likely token's, so that every
#: order of additions gives the same sum: rows of up to 2^23 tokens fit.
MASS_SCALE = 2.0**40


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What was sampled, on the device."""

    token_ids: Tensor
    """int64 [S]."""
    highest: Tensor
    """float32 [S]: the highest logit of each one's row; NaN if any is NaN. Where it is not finite
    the token means nothing."""


def probability_mass(scores: Tensor) -> Tensor:
    """Give exp(scores), for float32 scores of at most 0, as int64 in units of 2^-40."""
    return scores.exp().mul_(MASS_SCALE).long()


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    child: Tensor,
    position: Tensor,
    vocab_size: int,
    *,
    sources: Tensor | None = None,
    with_draws: bool = True,
    with_top_k: bool = True,
    with_top_p: bool = True,
) -> SampledTokens:
    """Sample S tokens from rows of float32 logits [R, vocab_size or more], left as they are.

    Greedy (the lowest id among equals) where the temperature is 0; else the logits below the
    row's highest are divided by it, min_p, top_k (0: off) and top_p are applied in this order, and
    a token is drawn by Gumbel-max with the noise of its key (seed, child, position). Equal scores
    rank by lowest id. All parameters are [S]; temperature, top_p and min_p are float32, the others
    int64. `sources` int64 [S] names each sample's row, where it is not the sample's own.

    `with_draws`, `with_top_k` and `with_top_p` may be False only where no sample has a temperature,
    a top_k, or a top_p below 1: that saves kernels. On CUDA nothing waits for the device and all
    shapes are fixed, so that a CUDA graph can hold it.
    """
    if logits.dtype != torch.float32 or logits.stride(-1) != 1:
        raise ValueError(f"float32 logits in contiguous rows are needed, not {logits.dtype}")
    if not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"vocab_size {vocab_size} does not fit logits of {logits.shape[1]}")
    params = (temperature, top_k, top_p, min_p, seed, child, position)
    if not runs_triton(logits):
        return SampledTokens(*reference.sample_tokens(logits, *params, vocab_size, sources))
    # Imported here: Triton may be absent.
    from inferq.kernels import triton_sampling

    return SampledTokens(
        *triton_sampling.sample_tokens(
            logits,
            *params,
            vocab_size,
            sources=sources,
            with_draws=with_draws,
            with_top_k=with_top_k,
            with_top_p=with_top_p,
        )
    )
