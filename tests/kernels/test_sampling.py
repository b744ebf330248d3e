"""The reference that the kernels are compared with draws what the engine's sampler draws."""

import numpy as np
import pytest
import torch

from inferq.kernels.sampling import probability_mass, sample_tokens
from inferq.worker.engine.sampling.sampler import Sampler, SamplingBatch

ROWS = 48


def sampling_batch(**limits):
    """A batch of rows that repeat the given values."""
    generator = np.random.default_rng(0)

    def column(name, default, dtype):
        values = limits.get(name, [default])
        return np.array([values[row % len(values)] for row in range(ROWS)], dtype=dtype)

    return SamplingBatch(
        temperature=column("temperature", 1.0, np.float32),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float32),
        min_p=column("min_p", 0.0, np.float32),
        seed=generator.integers(-(2**63), 2**63 - 1, ROWS),
        child=np.arange(ROWS) % 3,
        position=np.arange(ROWS) * 7,
        num_logprobs=np.full(ROWS, -1),
        is_ranked=np.zeros(ROWS, dtype=np.bool_),
    )


def tokens_of_both(logits, batch, vocab_size):
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "position")
    columns = [torch.from_numpy(getattr(batch, name)) for name in names]
    drawn = sample_tokens(logits, *columns, vocab_size).token_ids.tolist()
    return drawn, Sampler(vocab_size).sample(logits.clone(), batch).token_ids


LIMITS = [
    {"temperature": [0.0]},
    {"temperature": [0.3, 1.0, 2.0]},
    {"min_p": [0.05, 1.0]},
    {"top_k": [1, 40, 3000, 700]},
    {"top_p": [0.9, 0.5, 0.01, 0.9999]},
    {"top_k": [5, 0, 50], "top_p": [0.8, 0.95, 1.0], "min_p": [0.0, 0.02], "temperature": [0, 1.5]},
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_reference_draws_the_samplers_tokens(limits, scale):
    logits = torch.randn(ROWS, 2503, generator=torch.Generator().manual_seed(0)) * scale
    logits[:, 2500:] = 1e9
    drawn, expected = tokens_of_both(logits, sampling_batch(**limits), 2500)
    assert drawn == expected


@pytest.mark.parametrize("limits", LIMITS)
def test_the_reference_draws_the_samplers_tokens_among_equals(limits):
    logits = torch.randn(ROWS, 900, generator=torch.Generator().manual_seed(1)).round()
    drawn, expected = tokens_of_both(logits, sampling_batch(**limits), 900)
    assert drawn == expected


def test_several_samples_come_from_one_row():
    batch = sampling_batch(top_p=[0.9])
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "position")
    columns = [torch.from_numpy(getattr(batch, name)) for name in names]
    logits = torch.randn(3, 50)
    sources = torch.arange(ROWS) % 3
    several = sample_tokens(logits, *columns, 50, sources=sources)
    repeated = sample_tokens(logits[sources], *columns, 50)
    assert several.token_ids.tolist() == repeated.token_ids.tolist()
    assert torch.equal(several.highest, repeated.highest)


def test_the_mass_of_the_largest_vocabulary_fits():
    scores = torch.zeros(1)
    assert probability_mass(scores).item() * 2**22 < 2**63
    assert probability_mass(torch.tensor([-torch.inf, -100.0])).tolist() == [0, 0]


def test_what_cannot_be_sampled_is_refused():
    batch = sampling_batch()
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "position")
    columns = [torch.from_numpy(getattr(batch, name)) for name in names]
    with pytest.raises(ValueError, match="float32 logits"):
        sample_tokens(torch.zeros(ROWS, 8, dtype=torch.float16), *columns, 8)
    with pytest.raises(ValueError, match="vocab_size 9 does not fit logits of 8"):
        sample_tokens(torch.zeros(ROWS, 8), *columns, 9)
