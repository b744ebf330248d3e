"""Offline generation with the small real model equals the reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferq import LLM, SamplingParams

pytestmark = pytest.mark.model

GREEDY = {"temperature": 0.0, "ignore_eos": False}


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), max_model_len=1024, num_kv_blocks=512)


def test_every_prompt_alone_gives_the_reference_tokens(llm: LLM, greedy_cases) -> None:
    for case in greedy_cases:
        params = SamplingParams(**GREEDY, max_tokens=len(case.token_ids))
        [output] = llm.generate({"prompt_token_ids": case.prompt_token_ids}, params, use_tqdm=False)
        assert output.outputs[0].token_ids[: case.sure] == case.token_ids[: case.sure], case.name


def test_all_prompts_in_one_batch_give_the_reference_tokens(llm: LLM, greedy_cases) -> None:
    outputs = llm.generate(
        [case.prompt_token_ids for case in greedy_cases],
        [SamplingParams(**GREEDY, max_tokens=len(case.token_ids)) for case in greedy_cases],
        use_tqdm=False,
    )
    for case, output in zip(greedy_cases, outputs, strict=True):
        assert output.outputs[0].token_ids[: case.sure] == case.token_ids[: case.sure], case.name


def test_text_equals_the_reference_text(llm: LLM, greedy_cases) -> None:
    case = next(case for case in greedy_cases if case.name == "czech")
    assert case.sure == len(case.token_ids)
    params = SamplingParams(temperature=0.0, max_tokens=len(case.token_ids))
    [output] = llm.generate([case.prompt_token_ids], params, use_tqdm=False)
    assert output.outputs[0].text == case.text


def test_chat_answers_paris(llm: LLM) -> None:
    [output] = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0.0, max_tokens=16),
        use_tqdm=False,
    )
    completion = output.outputs[0]
    assert "Paris" in completion.text
    assert completion.finish_reason == "stop"


def test_sixty_four_mixed_requests_share_a_pool_of_sixty_four_blocks(
    smollm2: Path, greedy_cases
) -> None:
    short = [case for case in greedy_cases if len(case.prompt_token_ids) <= 300]
    cases = [short[i % len(short)] for i in range(64)]
    llm = LLM(str(smollm2), max_model_len=1024, num_kv_blocks=64)
    outputs = llm.generate(
        [case.prompt_token_ids for case in cases],
        [SamplingParams(**GREEDY, max_tokens=len(case.token_ids)) for case in cases],
        use_tqdm=False,
    )
    for case, output in zip(cases, outputs, strict=True):
        assert output.outputs[0].token_ids[: case.sure] == case.token_ids[: case.sure], case.name
    stats = llm.stats()
    assert stats.blocks_used == 0
    assert stats.blocks_free == stats.blocks_total == 64
