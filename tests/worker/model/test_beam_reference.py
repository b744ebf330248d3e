"""Beam search against transformers' `generate`: the same texts with the same scores."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.beam import BeamHypothesis, BeamSearch
from inferq.worker.engine.plan import BeamCandidates
from inferq.worker.engine.ranking import most_likely

WIDTH = 4
MAX_NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 5, 17)


@dataclass(frozen=True)
class Found:
    """One text that a search returned."""

    token_ids: tuple[int, ...]
    score: float


@pytest.fixture(scope="module")
def model(make_model: Callable[..., Path]) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        make_model(), dtype=torch.float32, attn_implementation="eager"
    )


@torch.inference_mode()
def search(
    model: Any, prompt: list[int], params: SamplingParams, eos: list[int]
) -> tuple[BeamHypothesis, ...]:
    """Search with the reference's own log-probabilities, so that only the search can differ."""
    assert params.max_tokens is not None
    beams = BeamSearch(params, eos_token_ids=frozenset(eos), max_new_tokens=params.max_tokens)
    texts = [prompt]
    while not beams.is_done:
        logits = model(torch.tensor(texts)).logits[:, -1].float()
        best, ids = most_likely(logits.log_softmax(dim=-1), beams.num_candidates)
        step = beams.advance(
            [
                BeamCandidates(tuple(row_ids), tuple(row))
                for row_ids, row in zip(ids.tolist(), best.tolist(), strict=True)
            ]
        )
        texts = [[*texts[survivor.parent], survivor.token_id] for survivor in step.survivors]
    return beams.hypotheses()


def reference(model: Any, prompt: list[int], params: SamplingParams, eos: list[int]) -> list[Found]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens,
        do_sample=False,
        eos_token_id=eos or None,
        pad_token_id=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (output.beam_indices >= 0).sum(dim=1).tolist()
    return [
        Found(tuple(text[len(prompt) : len(prompt) + length]), score)
        for text, length, score in zip(
            output.sequences.tolist(), lengths, output.sequences_scores.tolist(), strict=True
        )
    ]


def assert_same(found: tuple[BeamHypothesis, ...], expected: list[Found]) -> None:
    assert [hypothesis.token_ids for hypothesis in found] == [text.token_ids for text in expected]
    scores = [hypothesis.score for hypothesis in found]
    assert scores == pytest.approx([text.score for text in expected], rel=1e-5, abs=1e-5)


def likely_ends(model: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that the search meets on its way, so that texts end at many lengths."""
    params = SamplingParams(beam_width=WIDTH, n=WIDTH, max_tokens=MAX_NEW_TOKENS)
    texts = [hypothesis.token_ids for hypothesis in search(model, prompt, params, [])]
    met = dict.fromkeys(token for column in zip(*texts, strict=True) for token in column)
    return list(met)[1 : 1 + 2 * count : 2]


@pytest.mark.parametrize("num_ends", [0, 1, 3])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.5, 1.0, 2.0, 0.0, -1.0])
def test_texts_and_scores_are_those_of_transformers(
    model, random_text, length_penalty, early_stopping, num_ends
):
    reasons = set()
    for seed, length in enumerate(PROMPT_LENGTHS):
        prompt = random_text(length, seed)
        eos = likely_ends(model, prompt, num_ends)
        params = SamplingParams(
            beam_width=WIDTH,
            n=WIDTH,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_tokens=MAX_NEW_TOKENS,
        )
        found = search(model, prompt, params, eos)
        assert_same(found, reference(model, prompt, params, eos))
        reasons |= {hypothesis.finish_reason for hypothesis in found}
    assert FinishReason.STOP in reasons if num_ends else reasons == {FinishReason.LENGTH}


@pytest.mark.parametrize(("width", "n"), [(2, 1), (3, 2), (7, 7)])
def test_any_width_and_number_of_texts_is_as_in_transformers(model, random_text, width, n):
    prompt = random_text(9, 5)
    eos = likely_ends(model, prompt, 2)
    params = SamplingParams(beam_width=width, n=n, max_tokens=MAX_NEW_TOKENS)
    assert_same(search(model, prompt, params, eos), reference(model, prompt, params, eos))


def test_one_beam_is_transformers_greedy_search(model, random_text):
    prompt = random_text(9, 6)
    params = SamplingParams(beam_width=1, max_tokens=MAX_NEW_TOKENS)
    (found,) = search(model, prompt, params, [])
    greedy = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=1,
    )
    assert found.token_ids == tuple(greedy[0, len(prompt) :].tolist())


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_min_tokens_is_min_new_tokens(model, random_text, early_stopping):
    prompt = random_text(6, 10)
    eos = likely_ends(model, prompt, 3)
    params = SamplingParams(
        beam_width=WIDTH,
        n=WIDTH,
        early_stopping=early_stopping,
        min_tokens=5,
        max_tokens=MAX_NEW_TOKENS,
    )
    found = search(model, prompt, params, eos)
    assert_same(found, reference(model, prompt, params, eos))
    assert any(hypothesis.finish_reason is FinishReason.STOP for hypothesis in found)


def test_stop_tokens_end_texts_as_the_models_own_do(model, random_text):
    prompt = random_text(6, 8)
    eos = likely_ends(model, prompt, 2)
    params = SamplingParams(beam_width=WIDTH, n=WIDTH, max_tokens=MAX_NEW_TOKENS)
    expected = reference(model, prompt, params, eos)
    stopping = replace(params, stop_token_ids=eos, ignore_eos=True)
    assert_same(search(model, prompt, stopping, [3, 4]), expected)
