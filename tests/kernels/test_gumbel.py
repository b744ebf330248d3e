import pytest
import torch

from inferq.kernels.gumbel import gumbel_noise, philox

# Random123 1.14, examples/kat_vectors: philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def int64(*values: int) -> torch.Tensor:
    """Wrap values of up to 64 bits into int64."""
    return torch.tensor([(value + 2**63) % 2**64 - 2**63 for value in values])


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, words):
    result = philox(int64(key[0] | key[1] << 32), *(int64(word) for word in counter))
    assert " ".join(f"{int(word):08x}" for word in result) == words


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    return seeds, torch.arange(count) % 3, torch.arange(count) * 7


def test_chosen_tokens_get_the_noise_that_the_whole_vocabulary_gives_them():
    seeds, children, positions = rows(5)
    whole = gumbel_noise(seeds, children, positions, vocab_size=1003)
    assert whole.shape == (5, 1003)
    assert whole.dtype == torch.float32
    token_ids = torch.randint(0, 1003, (5, 17), generator=torch.Generator().manual_seed(2))
    chosen = gumbel_noise(seeds, children, positions, token_ids)
    assert torch.equal(chosen, whole.gather(1, token_ids))


def test_a_row_does_not_depend_on_the_batch_around_it():
    seeds, children, positions = rows(12)
    whole = gumbel_noise(seeds, children, positions, vocab_size=100_001)  # several chunks
    for row in (0, 7, 11):
        alone = gumbel_noise(
            seeds[row, None], children[row, None], positions[row, None], vocab_size=100_001
        )
        assert torch.equal(alone[0], whole[row])


def test_seed_child_and_position_each_change_the_noise():
    base = (int64(1), int64(0), int64(0))
    changed = [
        base,
        (int64(2), int64(0), int64(0)),
        (int64(1 + 2**32), int64(0), int64(0)),
        (int64(1), int64(1), int64(0)),
        (int64(1), int64(0), int64(1)),
    ]
    drawn = [tuple(gumbel_noise(*arguments, vocab_size=8)[0].tolist()) for arguments in changed]
    assert len(set(drawn)) == len(changed)


def test_noise_is_gumbel_distributed_and_finite():
    noise = gumbel_noise(*rows(20), vocab_size=50_000)
    assert noise.isfinite().all()
    # A million draws: mean 0.57722 and variance pi^2 / 6, with deviations of 0.0013 and 0.0034.
    assert abs(noise.double().mean().item() - 0.57722) < 0.006
    assert abs(noise.double().var().item() - 1.64493) < 0.015


def test_the_extreme_words_give_finite_noise(monkeypatch):
    words = int64(0, 0xFFFFFFFF, 0, 0xFFFFFFFF)
    monkeypatch.setattr(
        "inferq.kernels.gumbel.philox", lambda *_: tuple(word.reshape(1, 1) for word in words)
    )
    noise = gumbel_noise(int64(0), int64(0), int64(0), vocab_size=2)
    torch.testing.assert_close(noise, torch.tensor([[-2.8115, 16.6355]]), atol=1e-3, rtol=0)


def test_token_ids_and_vocab_size_exclude_each_other():
    with pytest.raises(ValueError, match="either token_ids or vocab_size"):
        gumbel_noise(int64(0), int64(0), int64(0))
    with pytest.raises(ValueError, match="either token_ids or vocab_size"):
        gumbel_noise(int64(0), int64(0), int64(0), int64(3)[None], vocab_size=8)
