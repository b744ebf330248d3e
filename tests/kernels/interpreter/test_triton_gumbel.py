import pytest
import torch

from inferq.kernels import triton_gumbel
from inferq.kernels.gumbel import gumbel_noise


def keys(rows):
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    return seeds, torch.arange(rows) % 3, torch.arange(rows) * 2_000_003


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1021, 1024, 2049])
def test_noise_of_the_whole_vocabulary_is_the_same(vocab_size):
    result = triton_gumbel.vocabulary_noise(*keys(3), vocab_size)
    assert torch.equal(result, gumbel_noise(*keys(3), vocab_size=vocab_size))


@pytest.mark.parametrize("count", [1, 17, 1025])
def test_noise_of_chosen_tokens_is_the_same(count):
    token_ids = torch.randint(0, 151_936, (3, count), generator=torch.Generator().manual_seed(2))
    result = triton_gumbel.token_noise(*keys(3), token_ids)
    assert torch.equal(result, gumbel_noise(*keys(3), token_ids))


def test_no_rows_have_no_noise():
    assert triton_gumbel.vocabulary_noise(*keys(0), 9).shape == (0, 9)
