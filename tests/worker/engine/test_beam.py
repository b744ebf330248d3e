"""Beam search's rules one by one, and all of them against a search that keeps every score."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.beam import BeamHypothesis, BeamSearch, Survivor
from inferq.worker.engine.scheduling.plan import BeamCandidates

EOS = 0
#: Log-probabilities of all tokens after a text.
Model = Callable[[tuple[int, ...]], list[float]]


def search_of(*, eos: frozenset[int] = frozenset({EOS}), limit: int = 8, **params) -> BeamSearch:
    params = {"n": params.get("beam_width", 1), "max_tokens": None, **params}
    return BeamSearch(SamplingParams(**params), eos_token_ids=eos, max_new_tokens=limit)


def row(*candidates: tuple[int, float]) -> BeamCandidates:
    """Candidates as pairs of token and log-probability."""
    return BeamCandidates(
        tuple(token for token, _ in candidates), tuple(logprob for _, logprob in candidates)
    )


def best_of(logprobs: list[float], count: int) -> BeamCandidates:
    """What the model runner gives: the highest, equals by ascending id."""
    ids = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))[:count]
    return BeamCandidates(tuple(ids), tuple(logprobs[token] for token in ids))


def run(search: BeamSearch, model: Model, num_candidates: int = 0) -> tuple[BeamHypothesis, ...]:
    """Search to the end, as an engine would."""
    texts: list[tuple[int, ...]] = [()]
    while not search.is_done:
        count = num_candidates or search.num_candidates
        step = search.advance([best_of(model(text), count) for text in texts])
        texts = [(*texts[survivor.parent], survivor.token_id) for survivor in step.survivors]
    assert not texts
    return search.hypotheses()


def random_model(seed: int, vocab_size: int, grain: float, levels: int = 40) -> Model:
    """Log-probabilities that depend on the whole text, of few levels: many are equal."""

    def logprobs(text: tuple[int, ...]) -> list[float]:
        draw = random.Random(hash((seed, text)))
        return [-grain * draw.randint(1, levels) for _ in range(vocab_size)]

    return logprobs


def tokens_of(hypotheses: tuple[BeamHypothesis, ...]) -> list[tuple[int, ...]]:
    return [hypothesis.token_ids for hypothesis in hypotheses]


# --- the rules, one by one


def test_the_first_step_spreads_one_beam_and_the_next_ones_rank_all_beams_together():
    search = search_of(beam_width=2)
    assert search.num_live == 1
    first = search.advance([row((5, -1.0), (6, -1.5), (7, -3.0))])
    assert first.survivors == (Survivor(0, 5, -1.0), Survivor(0, 6, -1.5))
    assert search.num_live == 2
    second = search.advance([row((1, -2.0), (2, -2.5)), row((3, -0.25), (4, -1.0))])
    assert second.survivors == (Survivor(1, 3, -1.75), Survivor(1, 4, -2.5))
    assert not search.is_done
    assert search.hypotheses() == ()


def test_equal_continuations_go_by_beam_and_then_by_token():
    search = search_of(beam_width=3)
    first = search.advance([row((4, -1.0), (7, -1.0), (9, -1.0), (11, -1.0))])
    assert [survivor.token_id for survivor in first.survivors] == [4, 7, 9]
    second = search.advance([row((8, -2.0)), row((3, -2.0), (5, -2.0)), row((1, -2.0))])
    assert [(s.parent, s.token_id) for s in second.survivors] == [(0, 8), (1, 3), (1, 5)]


def test_a_text_with_an_end_token_finishes_and_its_beam_goes_on_with_other_tokens():
    search = search_of(beam_width=2)
    step = search.advance([row((EOS, -0.5), (5, -1.0), (6, -2.0))])
    assert step.survivors == (Survivor(0, 5, -1.0), Survivor(0, 6, -2.0))
    assert search.hypotheses() == (BeamHypothesis((EOS,), -0.5, -0.5, FinishReason.STOP),)


def test_an_end_below_the_first_beam_width_candidates_is_dropped():
    search = search_of(beam_width=2)
    step = search.advance([row((5, -1.0), (6, -2.0), (EOS, -2.5))])
    assert [survivor.token_id for survivor in step.survivors] == [5, 6]
    assert search.hypotheses() == ()
    # Second in one beam, but third of all.
    search.advance([row((7, -0.5), (EOS, -1.5)), row((8, -0.25))])
    assert search.hypotheses() == ()


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_the_score_is_the_sum_over_the_generated_length_to_the_power_of_the_penalty(penalty):
    search = search_of(beam_width=1, limit=3, length_penalty=penalty)
    for token in (5, 6, 7):
        search.advance([row((token, -1.0), (8, -9.0))])
    (hypothesis,) = search.hypotheses()
    assert hypothesis == BeamHypothesis((5, 6, 7), -3.0, -3.0 / 3**penalty, FinishReason.LENGTH)


def test_at_the_limit_the_running_beams_become_hypotheses():
    search = search_of(beam_width=2, limit=2)
    search.advance([row((5, -1.0), (6, -1.5), (7, -9.0))])
    step = search.advance([row((3, -1.0), (EOS, -1.25)), row((4, -1.0), (8, -1.5))])
    assert step.survivors == ()
    assert search.is_done
    assert search.num_live == 0
    assert search.hypotheses() == (
        BeamHypothesis((5, 3), -2.0, -1.0, FinishReason.LENGTH),
        BeamHypothesis((5, EOS), -2.25, -1.125, FinishReason.STOP),
    )


def test_a_search_that_is_stopped_finishes_its_beams_as_they_are():
    search = search_of(beam_width=2)
    search.advance([row((EOS, -1.25), (5, -1.0), (6, -3.0))])
    search.stop()
    assert search.is_done
    assert search.hypotheses() == (
        BeamHypothesis((5,), -1.0, -1.0, FinishReason.LENGTH),
        BeamHypothesis((EOS,), -1.25, -1.25, FinishReason.STOP),
    )


def test_with_early_stopping_the_search_is_done_once_enough_texts_have_finished():
    rows = [row((EOS, -0.5), (5, -1.0), (6, -2.0))]
    eager, patient = (search_of(beam_width=2, early_stopping=early) for early in (True, False))
    for search in (eager, patient):
        search.advance(rows)
        # This one finishes worse than the beam that goes on could do now.
        search.advance([row((7, -0.1), (8, -7.0)), row((EOS, -3.0), (9, -3.5))])
    assert eager.is_done
    assert not patient.is_done
    assert tokens_of(eager.hypotheses()) == [(EOS,), (6, EOS)]


def test_without_early_stopping_the_search_is_done_when_no_beam_could_finish_better_now():
    search = search_of(beam_width=1)
    search.advance([row((EOS, -0.5), (5, -1.0))])
    assert search.is_done  # -1.0 / 1 is worse than -0.5 / 1


@pytest.mark.parametrize(("penalty", "is_done"), [(1.0, False), (0.25, True), (0.0, True)])
def test_never_judges_a_beam_by_the_longest_it_could_become(penalty, is_done):
    search = search_of(beam_width=1, limit=8, early_stopping="never", length_penalty=penalty)
    search.advance([row((EOS, -0.5), (5, -1.0))])
    # -1.0 / 8 ** penalty against -0.5
    assert search.is_done is is_done


@pytest.mark.parametrize("early", [False, "never"])
def test_a_penalty_below_zero_judges_a_beam_by_its_present_length(early):
    search = search_of(beam_width=2, limit=8, early_stopping=early, length_penalty=-1.0)
    search.advance([row((5, -0.2), (EOS, -0.5), (6, -3.0))])
    search.advance([row((7, -0.05), (EOS, -0.1)), row((8, -1.0))])
    # -0.25 * 2 against -0.3 * 2; at the limit it would be -0.25 * 8.
    assert not search.is_done


def test_a_beam_that_could_only_equal_the_worst_finished_text_is_not_followed():
    search = search_of(beam_width=1)
    search.advance([row((EOS, -1.0), (5, -1.0))])
    assert search.is_done


def test_a_worse_text_that_finishes_later_replaces_none_and_a_better_one_the_worst():
    search = search_of(beam_width=1, early_stopping="never", length_penalty=2.0)
    search.advance([row((EOS, -1.0), (5, -1.5))])
    assert tokens_of(search.hypotheses()) == [(EOS,)]
    search.advance([row((EOS, -3.0), (6, -3.5))])  # -4.5 / 4
    assert tokens_of(search.hypotheses()) == [(EOS,)]
    search.advance([row((EOS, -1.0), (7, -1.5))])  # -6 / 9
    assert tokens_of(search.hypotheses()) == [(5, 6, EOS)]


def test_of_equal_scores_the_text_that_finished_first_is_kept():
    search = search_of(beam_width=1, early_stopping="never", length_penalty=1.0)
    search.advance([row((EOS, -1.0), (5, -1.5))])
    search.advance([row((EOS, -0.5), (6, -0.75))])  # -2 / 2
    assert tokens_of(search.hypotheses()) == [(EOS,)]


def test_a_stop_token_is_named_and_the_models_own_end_token_is_not():
    search = search_of(beam_width=2, stop_token_ids=[7, EOS])
    search.advance([row((7, -0.5), (EOS, -1.0), (5, -2.0), (6, -3.0))])
    assert [(h.finish_reason, h.stop_reason) for h in search.hypotheses()] == [
        (FinishReason.STOP, 7),
        (FinishReason.STOP, None),
    ]


def test_ignored_end_tokens_are_tokens_like_others_unless_they_are_stop_tokens():
    ignoring = search_of(beam_width=1, limit=3, ignore_eos=True)
    assert tokens_of(run(ignoring, lambda _: [-0.1, -3.0])) == [(EOS, EOS, EOS)]
    stopping = search_of(beam_width=1, limit=3, ignore_eos=True, stop_token_ids=[EOS])
    (hypothesis,) = run(stopping, lambda _: [-0.1, -3.0])
    assert (hypothesis.token_ids, hypothesis.stop_reason) == ((EOS,), EOS)


def test_before_min_tokens_end_candidates_are_not_there():
    search = search_of(beam_width=1, min_tokens=2)
    # The end token neither finishes nor takes a place in the ranking.
    assert search.advance([row((EOS, -0.1), (5, -1.0))]).survivors == (Survivor(0, 5, -1.0),)
    assert search.advance([row((EOS, -0.1), (6, -1.0))]).survivors == (Survivor(0, 6, -2.0),)
    search.advance([row((EOS, -0.1), (7, -1.0))])
    assert tokens_of(search.hypotheses()) == [(5, 6, EOS)]


def test_only_the_n_best_are_returned():
    model = random_model(3, vocab_size=9, grain=0.1)
    all_four = run(search_of(beam_width=4, limit=5), model)
    assert len(all_four) == 4
    assert run(search_of(beam_width=4, limit=5, n=2), model) == all_four[:2]


def test_one_beam_is_greedy():
    model = random_model(5, vocab_size=9, grain=0.01)
    (hypothesis,) = run(search_of(beam_width=1, limit=6, ignore_eos=True), model)
    text: tuple[int, ...] = ()
    while len(text) < 6:
        text = (*text, best_of(model(text), 1).token_ids[0])
    assert hypothesis.token_ids == text


def test_impossible_tokens_are_no_continuations_and_fewer_beams_live_then():
    search = search_of(beam_width=4, limit=2)
    step = search.advance([row((5, -0.5), (6, -1.0), (7, -math.inf), (8, -math.inf))])
    assert [survivor.token_id for survivor in step.survivors] == [5, 6]
    search.advance([row((1, -0.5)), row((2, -0.5))])
    assert tokens_of(search.hypotheses()) == [(5, 1), (6, 2)]


def test_a_search_whose_beams_all_end_is_done():
    search = search_of(beam_width=2)
    assert search.advance([row((EOS, 0.0), (5, -math.inf))]).survivors == ()
    assert search.is_done
    assert tokens_of(search.hypotheses()) == [(EOS,)]


def test_more_candidates_than_it_asks_for_change_nothing():
    model = random_model(11, vocab_size=12, grain=0.1)
    settings = {"beam_width": 3, "limit": 6, "stop_token_ids": [3, 4, 5, 6]}
    assert search_of(**settings).num_candidates == 8
    assert run(search_of(**settings), model) == run(search_of(**settings), model, 12)


@pytest.mark.parametrize("penalty", [100.0, -100.0])
def test_extreme_penalties_and_lengths_stay_finite(penalty):
    search = search_of(beam_width=1, limit=3000, length_penalty=penalty)
    (hypothesis,) = run(search, lambda _: [-9.0, -0.5])
    assert len(hypothesis.token_ids) == 3000
    assert math.isfinite(hypothesis.score)


def test_candidates_must_match_the_live_beams():
    search = search_of(beam_width=2, limit=1)
    with pytest.raises(ValueError, match="2 candidates for 1 live beams"):
        search.advance([row((5, -1.0)), row((6, -1.0))])
    search.advance([row((5, -1.0))])
    with pytest.raises(ValueError, match="0 candidates for 0 live beams"):
        search.advance([])


def test_a_step_without_any_possible_continuation_is_refused():
    with pytest.raises(ValueError, match="above zero"):
        search_of(beam_width=2).advance([row((5, -math.inf))])


def test_parameters_without_beams_are_refused():
    with pytest.raises(ValueError, match="no beams"):
        search_of(n=1)


# --- all rules at once


def reference(model: Model, params: SamplingParams, limit: int) -> list[tuple]:
    """The search on whole tables, with a place for every beam and hypothesis from the start."""
    width, absent = params.beam_width, -1e9
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    live = [((), 0.0)] + [((), absent)] * (width - 1)
    finished = [((), absent, absent)] * width
    for length in range(1, limit + 1):
        table = []
        for beam, (text, total) in enumerate(live):
            for token, logprob in enumerate(model(text)):
                banned = token in ends and length <= params.min_tokens
                score = absent if total == absent or banned else total + logprob
                table.append((-score, beam, token))
        table.sort()
        top = [((*live[b][0], token), -s) for s, b, token in table[: (1 + len(ends)) * width]]
        hits = [text[-1] in ends or length == limit for text, _ in top]
        done = [
            (text, total, total / length**params.length_penalty)
            for (text, total), hit in zip(top[:width], hits, strict=False)
            if hit and total > absent
        ]
        finished = sorted(finished + done, key=lambda entry: -entry[2])[:width]
        live = [entry for entry, hit in zip(top, hits, strict=True) if not hit][:width]
        if length == limit or not live:
            break
        live += [((), absent)] * (width - len(live))
        ahead = params.early_stopping == "never" and params.length_penalty > 0
        possible = live[0][1] / (limit if ahead else length) ** params.length_penalty
        if finished[-1][2] > absent and (
            params.early_stopping is True or possible <= finished[-1][2]
        ):
            break
    return [entry for entry in finished if entry[1] > absent][: params.n]


@dataclass(frozen=True)
class Case:
    params: SamplingParams
    limit: int
    vocab_size: int
    seed: int
    grain: float


@st.composite
def cases(draw: st.DrawFn) -> Case:
    width = draw(st.integers(1, 4))
    limit = draw(st.integers(1, 7))
    vocab_size = draw(st.integers(3, 8))
    params = SamplingParams(
        beam_width=width,
        n=draw(st.integers(1, width)),
        length_penalty=draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.lists(st.integers(1, vocab_size - 2), max_size=2, unique=True)),
        min_tokens=draw(st.integers(0, limit)),
        max_tokens=limit,
    )
    grain = draw(st.sampled_from([0.05, 0.25, 1.0]))
    return Case(params, limit, vocab_size, draw(st.integers(0, 10**6)), grain)


@given(cases())
def test_any_search_ends_as_the_search_on_whole_tables_does(case: Case):
    model = random_model(case.seed, case.vocab_size, case.grain)
    search = BeamSearch(case.params, eos_token_ids=frozenset({EOS}), max_new_tokens=case.limit)
    found = run(search, model)
    assert [(h.token_ids, h.cumulative_logprob, h.score) for h in found] == reference(
        model, case.params, case.limit
    )
    for hypothesis in found:
        ends = hypothesis.token_ids[-1] in case.params.stop_token_ids or (
            hypothesis.token_ids[-1] == EOS and not case.params.ignore_eos
        )
        assert (hypothesis.finish_reason is FinishReason.STOP) == ends


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_a_search_wide_enough_finds_the_best_of_all_texts(penalty):
    limit, vocab_size = 3, 4
    model = random_model(7, vocab_size, grain=1e-6, levels=10**6)
    texts = []
    for length in range(1, limit + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            if EOS not in text[:-1] and (text[-1] == EOS or length == limit):
                total = sum(model(text[:i])[token] for i, token in enumerate(text))
                texts.append((total / length**penalty, text))
    texts.sort(reverse=True)
    search = search_of(
        beam_width=64, n=10, limit=limit, length_penalty=penalty, early_stopping="never"
    )
    assert tokens_of(run(search, model)) == [text for _, text in texts[:10]]


@given(st.integers(0, 10**6), st.sampled_from([True, False, "never"]), st.integers(1, 10))
def test_a_search_ends_within_max_tokens_with_as_many_texts_as_asked_for(seed, early, limit):
    search = search_of(beam_width=2, limit=limit, early_stopping=early, stop=["###"])
    found = run(search, random_model(seed, vocab_size=6, grain=0.1))
    assert len(found) == 2
    assert all(1 <= len(hypothesis.token_ids) <= limit for hypothesis in found)
    assert [h.score for h in found] == sorted((h.score for h in found), reverse=True)
