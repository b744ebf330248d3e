"""Which token is sampled, how often, and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferq.kernels.gumbel import gumbel_noise
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.sampling.logits_edits import LogitsEdits
from inferq.worker.engine.sampling.ranking import most_likely, most_likely_by_key
from inferq.worker.engine.sampling.sampler import Sampler, SamplingBatch, Unusable


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small rows gain nothing from threads, and lose much beside other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch_of(params: list[SamplingParams], positions: list[int] | None = None) -> SamplingBatch:
    return SamplingBatch(
        temperature=np.array([0 if p.is_greedy else p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int64),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed=np.array([p.seed or 0 for p in params], np.int64),
        child=np.zeros(len(params), np.int64),
        position=np.array(positions or [0] * len(params), np.int64),
        num_logprobs=np.array([-1 if p.logprobs is None else p.logprobs for p in params]),
        is_ranked=np.array([p.num_candidates > p.n for p in params]),
    )


def bans(pairs: list[tuple[int, int]]) -> LogitsEdits:
    columns = np.array(pairs, dtype=np.int64)
    return LogitsEdits(None, columns[:, 0].copy(), columns[:, 1].copy())


def log(probabilities: list[float]) -> Tensor:
    return torch.tensor(probabilities).log()


def draws(logits: Tensor, count: int, seed: int = 0, **params: Any) -> list[int]:
    """Sample `count` tokens from one row of logits, at positions 0, 1, 2, …"""
    sampling = [SamplingParams(seed=seed, **params)] * count
    rows = logits.repeat(count, 1)
    batch = batch_of(sampling, list(range(count)))
    return Sampler(logits.numel()).sample(rows, batch).token_ids


def shares(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.softmax(logits.double() / temperature, dim=-1)


def assert_drawn_as(tokens: list[int], expected: Tensor) -> None:
    """Chi-square test against exact probabilities; tokens of probability 0 must not occur."""
    counts = torch.bincount(torch.tensor(tokens), minlength=expected.numel()).double()
    assert counts[expected == 0].sum() == 0
    wanted = expected[expected > 0] * len(tokens)
    assert wanted.min() > 5, "too few draws for the test to mean anything"
    statistic = float(((counts[expected > 0] - wanted) ** 2 / wanted).sum())
    freedom = wanted.numel() - 1
    # Wilson-Hilferty: the 99.9 % point; 3.09 is that of the normal distribution.
    spread = 2 / (9 * freedom)
    assert statistic < freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_flattens_and_sharpens(temperature: float) -> None:
    tokens = draws(LOGITS, 20000, temperature=temperature)
    assert_drawn_as(tokens, shares(LOGITS, temperature))


def test_top_k_keeps_the_k_most_likely_in_proportion() -> None:
    expected = shares(LOGITS)
    expected[3:] = 0
    assert_drawn_as(draws(LOGITS, 20000, top_k=3), expected / expected.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    expected = shares(LOGITS)
    assert expected[:3].sum() < 0.8 < expected[:4].sum()
    expected[4:] = 0
    assert_drawn_as(draws(LOGITS, 20000, top_p=0.8), expected / expected.sum())


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    expected = shares(LOGITS, 2.0)
    expected[expected < 0.4 * expected[0]] = 0
    assert (expected > 0).sum() == 4
    tokens = draws(LOGITS, 20000, min_p=0.4, temperature=2.0)
    assert_drawn_as(tokens, expected / expected.sum())


def test_top_p_is_taken_over_the_renormalised_top_k_set() -> None:
    logits = log([0.1, 0.2, 0.3, 0.4])
    assert set(draws(logits, 200, top_k=2, top_p=0.5)) == {3}
    assert set(draws(logits, 200, top_p=0.5)) == {2, 3}


def test_top_k_keeps_exactly_k_of_equals_and_the_same_at_every_batch_size() -> None:
    logits = log([0.4, 0.3, 0.3, 0.0])
    assert set(draws(logits, 64, top_k=2)) == {0, 1}
    one_by_one = [
        Sampler(4).sample(logits[None].clone(), batch_of([SamplingParams(top_k=2, seed=0)], [n]))
        for n in range(64)
    ]
    assert [samples.token_ids[0] for samples in one_by_one] == draws(logits, 64, top_k=2)


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    params = [SamplingParams(temperature=0), SamplingParams(temperature=1e-6)]
    assert Sampler(4).sample(logits, batch_of(params)).token_ids == [1, 0]


def test_tiny_temperatures_are_nearly_greedy() -> None:
    assert set(draws(LOGITS * 100, 50, temperature=1.1e-5)) == {0}


def test_another_seed_or_position_gives_other_tokens() -> None:
    flat = torch.zeros(1000)
    first = draws(flat, 50)
    assert len(set(first)) > 40
    assert draws(flat, 50) == first
    assert sum(a == b for a, b in zip(draws(flat, 50, seed=1), first, strict=True)) < 5


def test_a_row_does_not_depend_on_its_company() -> None:
    """Every kind of row alone, first and last of a batch, gives the same token."""
    torch.manual_seed(0)
    kinds = [
        {"temperature": 0.0},
        {},
        {"min_p": 0.1},
        {"top_k": 7},
        {"top_k": 2000},
        {"top_k": 2500, "top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.99, "temperature": 1.5},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 3},
    ]
    params = [SamplingParams(seed=index % 3, **kind) for index, kind in enumerate(kinds * 3)]
    positions = list(range(len(params)))
    logits = torch.randn(len(params), 3000) * 2
    sampler = Sampler(3000)
    together = sampler.sample(logits.clone(), batch_of(params, positions)).token_ids
    backwards = batch_of(params[::-1], positions[::-1])
    assert sampler.sample(logits.flip(0), backwards).token_ids == together[::-1]
    for index, param in enumerate(params):
        alone = sampler.sample(logits[index, None].clone(), batch_of([param], [index]))
        assert alone.token_ids == [together[index]]


@pytest.mark.parametrize("top_k", [0, 1, 40, 600, 2500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_candidates_give_what_ranking_everything_gives(
    top_k: int, top_p: float, min_p: float
) -> None:
    """Against a plain form: sort the whole row, cut, renormalise, cut, add the noise."""
    torch.manual_seed(1)
    rows, size = 24, 3000
    # Rounded, so that equal logits abound; the last rows are nearly flat.
    logits = (torch.randn(rows, size) * torch.linspace(3, 0.1, rows)[:, None] * 8).round() / 8
    params = SamplingParams(seed=5, top_k=top_k, top_p=top_p, min_p=min_p, temperature=0.8)
    positions = list(range(rows))
    sampled = Sampler(size).sample(logits.clone(), batch_of([params] * rows, positions))
    key = [torch.full((rows,), value) for value in (5, 0)]
    noise = gumbel_noise(*key, torch.arange(rows), vocab_size=size)
    for row in range(rows):
        scores = (logits[row] - logits[row].max()) / np.float32(0.8)
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[scores[order] >= math.log(min_p) if min_p else slice(None)]
        order = order[: top_k or size]
        weights = scores[order].double().exp()
        before = weights.cumsum(0) - weights
        order = order[before < np.float32(top_p) * weights.sum()]
        best = order[torch.argmax(scores[order] + noise[row, order])]
        assert sampled.token_ids[row] == best


@pytest.mark.parametrize("temperature", [0.05, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_a_draw_from_whole_rows_is_the_highest_noisy_score(
    temperature: float, min_p: float
) -> None:
    torch.manual_seed(2)
    rows, size = 64, 2000
    logits = torch.randn(rows, size) * 3
    params = SamplingParams(seed=3, temperature=temperature, min_p=min_p)
    sampled = Sampler(size).sample(logits.clone(), batch_of([params] * rows, list(range(rows))))
    key = [torch.full((rows,), value) for value in (3, 0)]
    noise = gumbel_noise(*key, torch.arange(rows), vocab_size=size)
    scores = (logits - logits.amax(dim=1, keepdim=True)) / np.float32(temperature)
    scores[scores < (math.log(min_p) if min_p else -math.inf)] = -math.inf
    assert sampled.token_ids == (scores + noise).argmax(dim=1).tolist()


def test_the_most_likely_tokens_are_ordered_by_score_then_id() -> None:
    torch.manual_seed(0)
    scores = torch.randint(0, 6, (50, 40)).float()
    for count in (1, 3, 17, 39, 40, 99):
        best, ids = most_likely(scores, count)
        order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :count]
        assert torch.equal(ids, order)
        assert torch.equal(best, scores.gather(1, order))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    expected = torch.log_softmax(logits, dim=1)
    params = [
        SamplingParams(temperature=0.3, top_k=4, logprobs=5, seed=1),
        SamplingParams(seed=2),
        SamplingParams(temperature=0, logprobs=0),
    ]
    best = int(logits[0].argmax())
    samples = Sampler(50).sample(logits.clone(), batch_of(params), bans([(0, best)]))
    first, nothing, chosen_only = samples.logprobs
    assert nothing is None
    assert first is not None
    order = expected[0].argsort(descending=True)[:5].tolist()
    assert [token for token, _ in first.top] == order
    assert order[0] == best != samples.token_ids[0]
    for token, value in [*first.top, (samples.token_ids[0], first.logprob)]:
        assert value == pytest.approx(float(expected[0, token]), abs=1e-5)
    assert chosen_only is not None
    assert chosen_only.top == ()
    assert chosen_only.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_banned_tokens_are_never_sampled(params: dict[str, Any]) -> None:
    logits = torch.tensor([9.0, 8.0, 0.0, 0.5]).repeat(40, 1)
    banned = [(row, token) for row in range(20) for token in (0, 1)]
    sampling = [SamplingParams(seed=0, **params)] * 40
    tokens = Sampler(4).sample(logits, batch_of(sampling, list(range(40))), bans(banned)).token_ids
    assert set(tokens[:20]) <= {2, 3}
    assert set(tokens[20:]) <= {0, 1}


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 8}, {"top_p": 0.9}], ids=str)
def test_rows_beyond_the_vocabulary_are_padding(params: dict[str, Any]) -> None:
    logits = torch.zeros(30, 10)
    logits[:, 6:] = 5.0
    sampling = [SamplingParams(seed=0, logprobs=10, **params)] * 30
    samples = Sampler(6).sample(logits, batch_of(sampling, list(range(30))))
    assert max(samples.token_ids) < 6
    for entry in samples.logprobs:
        assert entry is not None
        assert [token for token, _ in entry.top] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_without_a_usable_maximum_are_named(params: dict[str, Any], value: float) -> None:
    logits = torch.zeros(3, 4)
    logits[1, 2] = value
    samples = Sampler(4).sample(logits, batch_of([SamplingParams(seed=0, **params)] * 3))
    assert samples.unusable_rows == {1: Unusable.NOT_FINITE}
    assert len(samples.token_ids) == 3


def test_16_bit_logits_are_sampled_in_float32() -> None:
    logits = LOGITS.bfloat16()
    assert draws(logits, 20, top_p=0.9) == draws(logits.float(), 20, top_p=0.9)


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_ranking_by_keys_is_the_same_ranking(count: int) -> None:
    torch.manual_seed(count)
    scores = torch.randn(20, 40).mul(2).round().div(2)  # many equals, both zeros
    scores[3, 5:20] = -torch.inf
    scores[4] = 0.0
    scores[5, ::2] = -0.0
    best, ids = most_likely(scores, count)
    keyed, keyed_ids = most_likely_by_key(scores, count)
    assert ids.tolist() == keyed_ids.tolist()
    assert best.tolist() == keyed.tolist()


def test_the_form_for_devices_samples_the_same_tokens() -> None:
    torch.manual_seed(1)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.5, "min_p": 0.01, "temperature": 1.7},
    ]
    params = [SamplingParams(seed=n, **kinds[n % len(kinds)]) for n in range(60)]
    batch = batch_of(params, list(range(60)))
    logits = torch.randn(60, 300) * 3
    logits[7, 4], logits[8] = torch.nan, torch.inf
    sampler = Sampler(290)
    expected = sampler.sample(logits.clone(), batch)
    tokens, highest = sampler.sample_on_device(logits[:, :290], batch, None)
    sound = [n for n in range(60) if n not in (7, 8)]
    assert [tokens.tolist()[n] for n in sound] == [expected.token_ids[n] for n in sound]
    assert set(expected.unusable_rows) == {7, 8}
    assert [n for n, finite in enumerate(highest.isfinite().tolist()) if not finite] == [7, 8]


def test_the_form_for_devices_samples_several_tokens_from_one_row() -> None:
    torch.manual_seed(2)
    children: list[tuple[int, ...]] = [(0, 1, 2), (0,), (3, 4)]
    batch = batch_of([SamplingParams(seed=n) for n in range(3)]).with_children(children)
    logits = torch.randn(3, 50)
    sampler = Sampler(50)
    expected = sampler.sample(logits.clone(), batch)
    assert batch.sources is not None
    tokens, highest = sampler.sample_on_device(logits, batch, torch.from_numpy(batch.sources))
    assert tokens.tolist() == expected.token_ids
    assert highest.tolist() == logits.amax(dim=1).tolist()
