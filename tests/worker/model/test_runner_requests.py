"""What a runner gives to requests that ask for more than a sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.scheduling.plan import BlockCopy, StepPlan

Make = Callable[..., Any]
VOCABULARY = 97


@pytest.fixture(scope="module")
def folder(make_model: Make) -> Path:
    made: Path = make_model()
    return made


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
@pytest.mark.parametrize("asked", [0, 3, -1])
def test_prompt_logprobs_are_those_of_transformers_in_chunks_of_any_size(
    folder: Path, loop_of: Make, reference_logits: Make, random_text: Make, chunk: int, asked: int
) -> None:
    loop = loop_of(folder)
    texts = [random_text(size, size) for size in (1, 2, 33, 70)]
    sequences = [loop.add(t, prompt_logprobs=asked, max_tokens=3) for t in texts]
    beside = loop.add(random_text(20, 0), max_tokens=3)
    loop.run([*sequences, beside], chunk)
    assert not any(result.prompt_logprobs for result in loop.results[beside])
    for text, sequence in zip(texts, sequences, strict=True):
        reports = [r for result in loop.results[sequence] for r in result.prompt_logprobs]
        expected = reference_logits(folder, text).log_softmax(dim=1)
        assert len(reports) == len(text) - 1
        for position, report in enumerate(reports):
            row = expected[position]
            assert report.logprob == pytest.approx(float(row[text[position + 1]]), abs=1e-4)
            count = VOCABULARY if asked == -1 else asked
            best = row.sort(descending=True).values[:count].tolist()
            assert [value for _, value in report.top] == pytest.approx(best, abs=1e-4)


def test_prompt_logprobs_come_again_for_a_prompt_that_is_computed_again_but_not_after_output(
    folder: Path, loop_of: Make, random_text: Make
) -> None:
    loop = loop_of(folder)
    sequence = loop.add(random_text(40, 1), prompt_logprobs=0, max_tokens=4)
    loop.step([sequence], 16)
    loop.drop(sequence)
    loop.run([sequence], 25)
    counts = [len(result.prompt_logprobs) for result in loop.results[sequence]]
    assert counts[:3] == [16, 25, 14]
    loop = loop_of(folder)
    sequence = loop.add(random_text(40, 1), prompt_logprobs=0, max_tokens=4)
    loop.step([sequence])
    loop.drop(sequence)
    loop.run([sequence])
    assert [len(result.prompt_logprobs) for result in loop.results[sequence]] == [39, 0, 0, 0]


@pytest.mark.parametrize("params", [{}, {"top_k": 9}, {"presence_penalty": 1.0}], ids=str)
def test_outputs_of_one_prompt_are_those_of_separate_sequences(
    folder: Path, loop_of: Make, random_text: Make, params: dict[str, Any]
) -> None:
    loop = loop_of(folder)
    prompt = random_text(21, 3)
    alone = []
    for index in range(4):
        sequence = loop.add(prompt, n=4, max_tokens=8, **params)
        sequence.child_index = index
        loop.run([sequence])
        alone.append(sequence.output_token_ids)
    assert len({tuple(tokens) for tokens in alone}) == 4

    parent = loop.add(prompt, n=4, max_tokens=8, **params)
    beside = loop.add(random_text(9, 4), temperature=0)
    first, other = loop.step([parent, beside], children=(0, 1, 2, 3))
    assert len(other.samples) == 4, "the loop gives all sequences the same children"
    tokens = [sample.token_id for sample in first.samples]
    assert tokens == [output[0] for output in alone]
    children = [parent, *(loop.fork(parent, index) for index in (1, 2, 3))]
    for child, token in zip(children, tokens, strict=True):
        child.token_ids.append(token)
    for child in children[1:]:
        loop.copy_on_write(child)
    loop.run(children)
    assert [child.output_token_ids for child in children] == alone


def test_ranked_outputs_tell_what_they_are_ranked_by(
    folder: Path, loop_of: Make, random_text: Make, reference_logits: Make
) -> None:
    loop = loop_of(folder)
    prompt = random_text(12, 3)
    ranked, asked, plain = (
        loop.add(prompt, max_tokens=5, **params) for params in ({"best_of": 2}, {"logprobs": 2}, {})
    )
    loop.run([ranked, asked, plain])
    assert all(r.samples[0].chosen_logprob is None for r in loop.results[plain])
    expected = reference_logits(folder, ranked.token_ids).log_softmax(dim=1)
    for position, result in enumerate(loop.results[ranked], start=len(prompt)):
        (sample,) = result.samples
        value = float(expected[position - 1, ranked.token_ids[position]])
        assert sample.chosen_logprob == pytest.approx(value, abs=1e-4)
        assert sample.logprob is None
    for result in loop.results[asked]:
        (sample,) = result.samples
        assert sample.logprob is not None
        assert sample.chosen_logprob == sample.logprob.logprob
        assert len(sample.logprob.top) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_beams_get_their_best_candidates(
    folder: Path, loop_of: Make, random_text: Make, reference_logits: Make, temperature: float
) -> None:
    loop = loop_of(folder)
    text = random_text(30, 5)
    beam = loop.add(text, beam_width=3, temperature=temperature, min_tokens=2, ignore_eos=False)
    beside = loop.add(random_text(4, 6))
    found, other = loop.step([beam, beside])
    assert found.samples == ()
    assert found.candidates is not None
    assert other.candidates is None
    assert len(other.samples) == 1
    logprobs = reference_logits(folder, text)[-1].log_softmax(dim=0)
    logprobs[2] = -torch.inf
    best = logprobs.sort(descending=True)
    assert found.candidates.token_ids == tuple(best.indices[:6].tolist())
    assert found.candidates.logprobs == pytest.approx(best.values[:6].tolist(), abs=1e-4)


def test_a_step_in_which_nobody_asks_never_meets_the_editor(
    folder: Path, loop_of: Make, random_text: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loop_of(folder)
    forbidden = ("start", "finish", "expect")
    for name in forbidden:
        monkeypatch.setattr(type(loop.runner._editor), name, _refuse)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0}, {"top_k": 3, "min_p": 0.1}]
    loop.run([loop.add(random_text(9, i), **kind) for i, kind in enumerate(kinds)])
    assert loop.runner._editor._kept == {}
    with pytest.raises(AssertionError, match="asked"):
        loop.run([loop.add(random_text(9, 0), presence_penalty=1.0)])


def _refuse(*args: object) -> None:
    raise AssertionError("nobody asked")


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"allowed_token_ids": [5, 6, 7, 8], "presence_penalty": 0.5},
        {"logit_bias": {9: 4.0}, "top_p": 0.9},
    ],
    ids=str,
)
def test_what_is_asked_gives_the_same_tokens_alone_in_company_and_computed_again(
    folder: Path, loop_of: Make, random_text: Make, params: dict[str, Any]
) -> None:
    loop = loop_of(folder)
    prompts = [random_text(10 + n, n) for n in range(5)]
    alone = []
    for prompt in prompts:
        sequence = loop.add(prompt, **params)
        loop.run([sequence])
        alone.append(sequence.output_token_ids)
    together = [loop.add(prompt, **params) for prompt in prompts]
    company = [loop.add(prompt) for prompt in prompts]
    for count in range(12):
        loop.step([*together, *company])
        loop.drop(together[count % 5])
    loop.run(together)
    assert [sequence.output_token_ids for sequence in together] == alone


def test_requests_that_nothing_can_follow_are_named_and_the_others_go_on(
    folder: Path, loop_of: Make, random_text: Make
) -> None:
    loop = loop_of(folder)
    dead = loop.add([5, 6], "dead", allowed_token_ids=[2], min_tokens=3, ignore_eos=False)
    sound = loop.add([5, 6], "sound")
    failed, result = loop.runner.execute(loop.plan([dead, sound]))
    assert failed.error is not None
    assert failed.error.code == "invalid_request"
    assert "no token may follow" in failed.error.message
    assert failed.samples == ()
    assert result.error is None
    assert len(result.samples) == 1


def test_a_form_that_the_model_has_no_tokenizer_for_fails_its_request_alone(
    folder: Path, loop_of: Make
) -> None:
    loop = loop_of(folder)
    asking = loop.add([5, 6], "asking", structured_outputs={"regex": "a+"})
    words = loop.add([5, 6], "words", bad_words=["a"])
    with pytest.raises(FailedRequestsError, match=r"has no tokenizer\.json") as caught:
        loop.step([asking, words, loop.add([5, 6], "sound")])
    assert set(caught.value.request_ids) == {"asking", "words"}


def test_broken_logits_of_a_prompt_are_named(folder: Path, loop_of: Make, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    loop = loop_of(copy)
    broken = loop.add([6, 5, 7], "broken", prompt_logprobs=1)
    with pytest.raises(FailedRequestsError, match="not finite"):
        loop.step([broken], 2)


def test_a_step_of_moves_alone_moves(folder: Path, loop_of: Make) -> None:
    runner = loop_of(folder, num_swap_blocks=4).runner
    cache, host = runner._kv_cache, runner._mover._host_blocks
    cache[3] = 1.5
    assert runner.execute(StepPlan([], swap_out=[BlockCopy(3, 1)])) == []
    assert bool((host[1] == 1.5).all())
    assert runner.execute(StepPlan([], swap_in=[BlockCopy(1, 9)])) == []
    assert runner.execute(StepPlan([], block_copies=[BlockCopy(9, 11)])) == []
    assert bool((cache[[9, 11]] == 1.5).all())
    assert bool((cache[10] == 0).all())


def test_a_sequence_that_was_swapped_goes_on_with_the_same_tokens(
    folder: Path, loop_of: Make, random_text: Make
) -> None:
    loop = loop_of(folder, num_swap_blocks=8)
    prompts = [random_text(30 + n, n) for n in range(3)]
    undisturbed = [loop.add(prompt, max_tokens=20) for prompt in prompts]
    loop.run(undisturbed)
    sequences = [loop.add(prompt, max_tokens=20) for prompt in prompts]
    for _ in range(6):
        loop.step(sequences)
    victim = sequences[1]
    table = victim.block_table
    out = [BlockCopy(block, index) for index, block in enumerate(table)]
    loop.runner.execute(StepPlan([], swap_out=out))
    for block in table:
        loop.runner._kv_cache[block] = torch.nan
    loop.step([sequences[0], sequences[2]])
    victim.block_table = [loop.free.pop() for _ in table]
    back = [BlockCopy(index, block) for index, block in enumerate(victim.block_table)]
    loop.runner.execute(StepPlan([], swap_in=back))
    loop.run(sequences)
    assert [s.token_ids for s in sequences] == [s.token_ids for s in undisturbed]


def test_preemption_is_measured(folder: Path, loop_of: Make, random_text: Make) -> None:
    loop = loop_of(folder, num_swap_blocks=4, num_kv_blocks=20)
    speeds = loop.runner.measure()
    assert speeds.block_bytes == 12288
    assert speeds.prefill_tokens_per_s > 0
    assert speeds.swap_bytes_per_s > 0
    fresh = loop_of(folder)
    outputs = []
    for each in (loop, fresh):
        sequence = each.add(random_text(20, 0))
        each.run([sequence])
        outputs.append(sequence.output_token_ids)
    assert outputs[0] == outputs[1]
