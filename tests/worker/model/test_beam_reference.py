"""Beam search against transformers' `generate`: the same texts with the same scores."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.beam import BeamHypothesis, BeamSearch
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.sampling.ranking import most_likely
from inferq.worker.engine.scheduling.plan import BeamCandidates
from inferq.worker.factory import load_engine
from inferq.worker.llm import LLM

WIDTH = 4
MAX_NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 5, 17)


@dataclass(frozen=True)
class Found:
    """One text that a search returned."""

    token_ids: tuple[int, ...]
    score: float


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    return make_model()


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
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


def assert_same(
    found: Sequence[BeamHypothesis | Found], expected: list[Found], tolerance: float = 1e-5
) -> None:
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
    scores = [text.score for text in found]
    wanted = [text.score for text in expected]
    assert scores == pytest.approx(wanted, rel=tolerance, abs=tolerance)


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


def engine_texts(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[list[Found]]:
    """Search all prompts at once in the engine; the texts of each, best first."""
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                params=replace(each, seed=0),
            )
        )
    found: list[list[Found]] = [[] for _ in prompts]
    while engine.has_work():
        for output in engine.step():
            texts = found[int(output.request_id)]
            assert (output.error, output.index) == (None, len(texts))
            assert output.score is not None
            texts.append(Found(output.token_ids, output.score))
        engine.check_integrity()
    return found


@pytest.mark.parametrize(
    ("num_kv_blocks", "preemption_mode"), [(256, "auto"), (20, "recompute"), (20, "swap")]
)
def test_the_engine_finds_what_transformers_finds_many_prompts_at_once(
    folder, model, random_text, num_kv_blocks, preemption_mode
):
    engine = load_engine(
        EngineConfig(
            model=str(folder),
            block_size=4,
            max_model_len=64,
            num_kv_blocks=num_kv_blocks,
            preemption_mode=preemption_mode,
            num_swap_blocks=40 if preemption_mode == "swap" else None,
        )
    )
    prompts, params, expected = [], [], []
    for seed, (penalty, early) in enumerate(
        itertools.product((0.5, 1.0, 2.0), (True, False, "never"))
    ):
        prompt = random_text(4 + 3 * seed, 10 + seed)
        eos = likely_ends(model, prompt, seed % 4)
        each = SamplingParams(
            beam_width=WIDTH,
            n=1 + seed % WIDTH,
            length_penalty=penalty,
            early_stopping=early,
            max_tokens=MAX_NEW_TOKENS,
        )
        expected.append(reference(model, prompt, each, eos))
        prompts.append(prompt)
        params.append(replace(each, stop_token_ids=eos, ignore_eos=True))
    for found, wanted in zip(engine_texts(engine, prompts, params), expected, strict=True):
        assert_same(found, wanted, 1e-4)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_kv_blocks == 20)
    assert (stats.num_swaps > 0) == (preemption_mode == "swap")


@pytest.mark.parametrize(("width", "num_ends", "min_tokens"), [(WIDTH, 3, 6), (2, 6, 0), (1, 5, 3)])
def test_the_engine_agrees_with_min_tokens_and_with_more_ends_than_beams(
    folder, model, random_text, width, num_ends, min_tokens
):
    engine = load_engine(EngineConfig(model=str(folder), max_model_len=64, num_kv_blocks=64))
    prompts, params, expected = [], [], []
    for seed in range(4):
        prompt = random_text(5 + seed, 40 + seed)
        eos = likely_ends(model, prompt, num_ends)
        each = SamplingParams(
            beam_width=width, n=width, max_tokens=MAX_NEW_TOKENS, min_tokens=min_tokens
        )
        if width > 1:
            expected.append(reference(model, prompt, each, eos))
        else:  # transformers' search by itself needs two: as many steps of the greedy one
            expected.append(
                [Found(text.token_ids, text.score) for text in search(model, prompt, each, eos)]
            )
        prompts.append(prompt)
        params.append(replace(each, stop_token_ids=eos, ignore_eos=True))
    for found, wanted in zip(engine_texts(engine, prompts, params), expected, strict=True):
        assert_same(found, wanted, 1e-4)


@pytest.mark.model
def test_offline_generation_finds_what_transformers_finds_on_a_real_model(smollm2):
    llm = LLM(str(smollm2), dtype="float32", num_kv_blocks=64, max_model_len=256)
    tokenizer = llm.get_tokenizer()
    eos = tokenizer.encode(".")
    prompts, params = [], []
    for text in ("The capital of France is", "Once upon a time there was a little dragon who"):
        for penalty, early in ((1.0, False), (2.0, True)):
            prompts.append(tokenizer.encode(text))
            params.append(
                SamplingParams(
                    beam_width=WIDTH,
                    n=WIDTH,
                    length_penalty=penalty,
                    early_stopping=early,
                    max_tokens=MAX_NEW_TOKENS,
                )
            )
    stopping = [replace(each, stop_token_ids=eos, ignore_eos=True) for each in params]
    outputs = llm.generate(prompts, stopping, use_tqdm=False)
    judge = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for output, prompt, each in zip(outputs, prompts, params, strict=True):
        found = []
        for text in output.outputs:
            assert text.cumulative_logprob is not None
            score = text.cumulative_logprob / len(text.token_ids) ** each.length_penalty
            found.append(Found(tuple(text.token_ids), score))
        assert_same(found, reference(judge, prompt, each, eos), 1e-4)
