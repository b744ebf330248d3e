"""What requests change in their logits, against a plain form for one row at a time."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence, SequenceStatus
from inferq.worker.engine.requests.token_parameters import check_token_parameters
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.sampling.bad_words import BadWords, word_tokens
from inferq.worker.engine.sampling.edit_asks import asks_edits
from inferq.worker.engine.sampling.logits_editor import LogitsEditor
from inferq.worker.engine.sampling.logits_edits import LogitsEdits
from inferq.worker.engine.sampling.logprobs import beam_candidates, token_logprobs
from inferq.worker.engine.sampling.sampler import Sampler, SamplingBatch, Unusable
from inferq.worker.engine.sampling.token_counts import TokenCounts

SIZE = 50
EOS = 2


class Spelling:
    """A vocabulary in which letters are tokens: a is 10, b is 11; a space is 3; "the" is 40."""

    def tokenize(self, text: str) -> list[int]:
        parts = text.replace("the", "T")
        return [{" ": 3, "T": 40}.get(part, ord(part) - 87) for part in parts]

    def tokenizer_json(self) -> str:
        raise AssertionError("nobody asks for a form")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def editor() -> LogitsEditor:
    return LogitsEditor(Spelling(), SIZE, frozenset({EOS}))  # type: ignore[arg-type]


def sequence_of(prompt: list[int], output: list[int], **params: Any) -> Sequence:
    request = EngineRequest(
        request_id=f"{prompt}{output}{params}",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(seed=0, **params),
    )
    sequence = Sequence(request, 16)
    sequence.token_ids += output
    return sequence


def edits_of(
    editor: LogitsEditor, sequences: list[Sequence], too_early: list[int] | None = None
) -> LogitsEdits:
    early = [(row, sequences[row]) for row in too_early or []]
    return editor.start(list(enumerate(sequences)), early).finish()


def edited(editor: LogitsEditor, sequences: list[Sequence], logits: Tensor) -> Tensor:
    changed = logits.clone()
    edits_of(editor, sequences).apply(changed)
    return changed


def penalized(logits: Tensor, sequence: Sequence) -> Tensor:
    """The definition, token by token."""
    params, values = sequence.params, logits.tolist()
    prompt = sequence.token_ids[: sequence.num_prompt_tokens]
    counts = Counter(sequence.output_token_ids)
    for token in {*prompt, *counts}:
        value = values[token]
        factor = params.repetition_penalty
        value = value / factor if value > 0 else value * factor
        value -= params.frequency_penalty * counts[token]
        value -= params.presence_penalty * (counts[token] > 0)
        values[token] = value
    return torch.tensor(values)


def batch_of(sequences: list[Sequence], **columns: Any) -> SamplingBatch:
    params = [s.params for s in sequences]
    given: dict[str, Any] = {
        "temperature": np.array([0 if p.is_greedy else p.temperature for p in params], np.float32),
        "top_k": np.array([max(p.top_k, 0) for p in params], np.int64),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([p.seed or 0 for p in params], np.int64),
        "child": np.zeros(len(params), np.int64),
        "position": np.array([len(s.token_ids) for s in sequences], np.int64),
        "num_logprobs": np.array([-1 if p.logprobs is None else p.logprobs for p in params]),
        "is_ranked": np.array([p.num_candidates > p.n for p in params]),
    }
    return SamplingBatch(**{**given, **columns})


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 0.8},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 1.25},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
def test_penalties_follow_their_definition_at_every_step(
    editor: LogitsEditor, params: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    draw = random.Random(0)
    sequence = sequence_of([4, 5, 5, 6], [], **params)
    for _ in range(150):
        logits = torch.randn(1, SIZE) * 3
        torch.testing.assert_close(
            edited(editor, [sequence], logits)[0], penalized(logits[0], sequence)
        )
        sequence.token_ids.append(draw.randrange(SIZE))


def test_a_token_of_the_prompt_alone_is_met_by_the_repetition_penalty_only(
    editor: LogitsEditor,
) -> None:
    logits = torch.full((2, SIZE), 3.0)
    sequences = [
        sequence_of([7, 8], [9], presence_penalty=1.0, frequency_penalty=1.0),
        sequence_of([7, 8], [9], repetition_penalty=2.0),
    ]
    counted, repeated = edited(editor, sequences, logits)
    assert counted[[7, 8, 9, 10]].tolist() == [3.0, 3.0, 1.0, 3.0]
    assert repeated[[7, 8, 9, 10]].tolist() == [1.5, 1.5, 1.5, 3.0]


def test_penalties_follow_a_sequence_whose_tokens_are_replaced(editor: LogitsEditor) -> None:
    sequence = sequence_of([7], [8, 8, 9], frequency_penalty=1.0)
    logits = torch.zeros(1, SIZE)
    assert edited(editor, [sequence], logits)[0, 8] == -2.0
    sequence.token_ids = [7, 10]
    changed = edited(editor, [sequence], logits)[0]
    assert (changed[8], changed[10]) == (0.0, -1.0)


def test_counts_grow_past_their_first_room() -> None:
    sequence = sequence_of([1], list(range(200)), presence_penalty=1.0)
    tokens, counts = TokenCounts(sequence, counts_prompt=False).update()
    assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == Counter(range(200))


def test_only_allowed_tokens_are_left(editor: LogitsEditor) -> None:
    sequence = sequence_of([7], [], allowed_token_ids=[0, 3, 31, 32, 49])
    changed = edited(editor, [sequence], torch.zeros(1, SIZE))[0]
    assert torch.nonzero(changed == 0).flatten().tolist() == [0, 3, 31, 32, 49]
    assert bool((changed[changed != 0] == -math.inf).all())


def test_biases_are_added_before_penalties(editor: LogitsEditor) -> None:
    sequence = sequence_of([7], [], logit_bias={7: 5.0, 49: -3.5}, repetition_penalty=2.0)
    changed = edited(editor, [sequence], torch.full((1, SIZE), -1.0))[0]
    assert (changed[7], changed[49], changed[8]) == (2.0, -4.5, -1.0)


def test_no_bias_brings_back_what_is_not_allowed(editor: LogitsEditor) -> None:
    params = {"allowed_token_ids": [5], "logit_bias": {6: 100.0}, "presence_penalty": -2.0}
    changed = edited(editor, [sequence_of([7], [6], **params)], torch.zeros(1, SIZE))[0]
    assert torch.nonzero(changed.isfinite()).flatten().tolist() == [5]


def test_bad_words_are_banned_with_and_without_a_space_before_them() -> None:
    spelled = word_tokens(["the", " ab", " "], Spelling().tokenize)
    assert spelled == {(40,), (3, 40), (10, 11), (3, 10, 11), (3,)}


def test_the_last_token_of_a_bad_word_is_banned_once_the_others_are_there() -> None:
    words = BadWords([(40,), (10, 11), (3, 10, 11), (10, 10, 12), (10, 99)], SIZE)
    assert words.single == [40]
    assert words.banned_after([10], 0) == [11]
    assert words.banned_after([3, 10], 0) == [11, 11]
    assert words.banned_after([10, 10], 0) == [12, 11]
    assert words.banned_after([10, 10], 1) == [11], "what stands in the prompt does not count"
    assert words.banned_after([10], 1) == []
    assert words.banned_after([11], 0) == []


def test_bad_words_never_appear(editor: LogitsEditor) -> None:
    torch.manual_seed(0)
    sequence = sequence_of([10], [], bad_words=["ab", "the", "ccc"])
    for _ in range(300):
        logits = torch.full((1, SIZE), -20.0)
        logits[0, [3, 10, 11, 12, 40]] = torch.randn(5)
        batch = batch_of([sequence])
        samples = Sampler(SIZE).sample(logits, batch, edits_of(editor, [sequence]))
        sequence.token_ids.append(samples.token_ids[0])
    output = sequence.output_token_ids
    assert {3, 10, 11, 12} == set(output)
    triples = zip(output, output[1:], output[2:], strict=False)
    assert (10, 11) not in pairwise(output)
    assert (12, 12, 12) not in triples


def test_no_end_comes_too_early(editor: LogitsEditor) -> None:
    sequences = [
        sequence_of([7], [], stop_token_ids=[5]),
        sequence_of([7], [], stop_token_ids=[5], ignore_eos=True),
        sequence_of([7], [], stop_token_ids=[5]),
    ]
    edits = editor.start([], [(0, sequences[0]), (1, sequences[1])]).finish()
    logits = torch.zeros(3, SIZE)
    edits.apply(logits)
    gone = [torch.nonzero(row == -math.inf).flatten().tolist() for row in logits]
    assert gone == [[EOS, 5], [5], []]


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    *PENALTIES,
    {"allowed_token_ids": [4, 9, 20, 33]},
    {"logit_bias": {4: 3.0, 9: -3.0}, "temperature": 0},
    {"bad_words": ["ab", "the"], "top_k": 5},
    {"bad_words": ["a"], "presence_penalty": 1.0, "top_p": 0.8, "logprobs": 3},
]


def test_a_row_does_not_depend_on_its_company(editor: LogitsEditor) -> None:
    torch.manual_seed(0)
    draw = random.Random(1)
    sequences = [
        sequence_of(draw.choices(range(SIZE), k=5), draw.choices(range(SIZE), k=9), **kind)
        for kind in KINDS
    ]
    logits = torch.randn(len(sequences), SIZE)
    sampler = Sampler(SIZE)
    together = sampler.sample(logits.clone(), batch_of(sequences), edits_of(editor, sequences))
    backwards = sequences[::-1]
    reverse = sampler.sample(logits.flip(0), batch_of(backwards), edits_of(editor, backwards))
    assert reverse.token_ids[::-1] == together.token_ids
    assert reverse.logprobs[::-1] == together.logprobs
    for row, sequence in enumerate(sequences):
        alone = sampler.sample(
            logits[row, None].clone(), batch_of([sequence]), edits_of(editor, [sequence])
        )
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == [together.logprobs[row]]


def test_rows_beside_edited_ones_keep_their_logits(editor: LogitsEditor) -> None:
    torch.manual_seed(0)
    sequences = [sequence_of([7], [8], **kind) for kind in KINDS]
    logits = torch.randn(2 * len(KINDS), SIZE)
    changed = logits.clone()
    pairs = [(2 * index, sequence) for index, sequence in enumerate(sequences)]
    editor.start(pairs, []).finish().apply(changed)
    assert torch.equal(changed[1::2], logits[1::2])


def test_logprobs_are_raw_whatever_is_asked_of_the_choice(editor: LogitsEditor) -> None:
    torch.manual_seed(0)
    sequence = sequence_of(
        [7],
        [8, 9],
        temperature=0.3,
        logprobs=5,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias={4: 9.0},
        bad_words=["the"],
    )
    logits = torch.randn(1, SIZE)
    expected = logits.log_softmax(dim=1)[0]
    samples = Sampler(SIZE).sample(
        logits.clone(), batch_of([sequence]), edits_of(editor, [sequence])
    )
    (report,) = samples.logprobs
    assert report is not None
    assert report.logprob == pytest.approx(float(expected[samples.token_ids[0]]), abs=1e-5)
    order = expected.argsort(descending=True)[:5].tolist()
    assert [token for token, _ in report.top] == order
    assert [value for _, value in report.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


def test_all_logprobs_are_the_whole_vocabulary_for_the_row_that_asks() -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, SIZE)
    counts = np.array([SIZE if row % 9 == 0 else row % 4 for row in range(70)])
    rows, tokens = torch.arange(70), torch.randint(0, SIZE, (70,))
    reports = token_logprobs(logits, rows, tokens, counts)
    expected = logits.log_softmax(dim=1)
    for row, report in enumerate(reports):
        order = expected[row].argsort(descending=True, stable=True)[: counts[row]].tolist()
        assert [token for token, _ in report.top] == order
        assert report.logprob == expected[row, tokens[row]].item()
        (alone,) = token_logprobs(logits, rows[row, None], tokens[row, None], counts[row, None])
        assert alone == report


def test_outputs_that_are_ranked_tell_their_tokens_logprob_alone() -> None:
    logits = torch.randn(2, SIZE)
    sequences = [sequence_of([7], [], best_of=3), sequence_of([7], [])]
    samples = Sampler(SIZE).sample(logits.clone(), batch_of(sequences))
    ranked, nothing = samples.logprobs
    assert nothing is None
    assert ranked is not None
    assert ranked.top == ()
    assert ranked.logprob == pytest.approx(
        float(logits.log_softmax(dim=1)[0, samples.token_ids[0]]), abs=1e-6
    )


def test_outputs_drawn_from_one_row_are_those_of_rows_of_their_own() -> None:
    """Also where they are drawn in several portions."""
    torch.manual_seed(0)
    logits = torch.randn(3, SIZE)
    first, second, third = (sequence_of([7], [], **kind) for kind in ({}, {"top_k": 9}, {"n": 3}))
    sources = np.array([0, *[1] * 300, *[2] * 300])
    child = np.array([0, *range(300), *range(300)])
    sequences = [first, *[second] * 300, *[third] * 300]
    batch = batch_of(sequences, sources=sources, child=child)
    together = Sampler(SIZE).sample(logits.clone(), batch).token_ids
    assert len(set(together[301:])) > 20
    for place in (0, 1, 150, 300, 301, 555, 600):
        alone = batch_of([sequences[place]], child=child[place, None])
        row = logits[sources[place], None].clone()
        assert Sampler(SIZE).sample(row, alone).token_ids == [together[place]]


def test_beam_candidates_are_the_best_of_the_log_softmax_with_ties_by_id() -> None:
    torch.manual_seed(0)
    logits = torch.randint(0, 4, (70, SIZE)).float()
    widths = [1 + row % 5 for row in range(70)]
    counts, totals = [2 * width for width in widths], logits.logsumexp(dim=1)
    found = beam_candidates(logits, totals, torch.arange(70), counts)
    expected = logits.log_softmax(dim=1)
    for row, (width, candidates) in enumerate(zip(widths, found, strict=True)):
        order = expected[row].argsort(descending=True, stable=True)[: 2 * width]
        assert candidates.token_ids == tuple(order.tolist())
        assert candidates.logprobs == pytest.approx(expected[row, order].tolist(), abs=1e-6)
        (alone,) = beam_candidates(logits, totals[row, None], torch.tensor([row]), [2 * width])
        assert alone == candidates


def test_beam_candidates_are_allowed_tokens(editor: LogitsEditor) -> None:
    params = {"beam_width": 2, "allowed_token_ids": [4, 5, 6], "logit_bias": {6: 1.0}}
    sequence = sequence_of([7], [], **params)
    batch = batch_of(
        [sequence],
        temperature=np.zeros(1, np.float32),
        beams=((0, 4),),
    )
    samples = Sampler(SIZE).sample(torch.zeros(1, SIZE), batch, edits_of(editor, [sequence]))
    (candidates,) = samples.candidates
    assert candidates.token_ids == (6, 4, 5)
    # as in transformers: each keeps its own probability, what was forbidden goes to nobody
    expected = [1.0 - math.log(SIZE), -math.log(SIZE), -math.log(SIZE)]
    assert candidates.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.9}], ids=str)
def test_a_row_that_its_edits_leave_empty_is_a_dead_end(
    editor: LogitsEditor, params: dict[str, Any]
) -> None:
    words = {"allowed_token_ids": [40], "bad_words": ["the"], **params}
    sequences = [sequence_of([7], [], **params), sequence_of([7], [], **words)]
    logits = torch.zeros(3, SIZE)
    logits[2] = math.nan
    batch = batch_of([*sequences, sequences[0]])
    samples = Sampler(SIZE).sample(logits, batch, edits_of(editor, sequences))
    assert samples.unusable_rows == {1: Unusable.DEAD_END, 2: Unusable.NOT_FINITE}


def test_a_request_whose_words_cannot_be_spelled_fails_alone() -> None:
    class Broken(Spelling):
        def tokenize(self, text: str) -> list[int]:
            raise InvalidRequestError("cannot be spelled", field="bad_words")

    editor = LogitsEditor(Broken(), SIZE, frozenset({EOS}))  # type: ignore[arg-type]
    sequences = [sequence_of([7], [], bad_words=["a"]), sequence_of([7], [], top_k=1)]
    with pytest.raises(FailedRequestsError, match="cannot be spelled") as caught:
        edits_of(editor, sequences)
    assert caught.value.request_ids == (sequences[0].request_id,)


def test_what_was_kept_for_a_sequence_goes_when_it_is_finished(editor: LogitsEditor) -> None:
    sequences = [sequence_of([7], [], presence_penalty=1.0) for _ in range(3)]
    edits_of(editor, sequences)
    assert len(editor._kept) == 3
    sequences[1].status = SequenceStatus.FINISHED
    edits_of(editor, [sequences[0]])
    assert list(editor._kept) == [sequences[0], sequences[2]]


def test_defaults_ask_for_no_edits() -> None:
    assert not asks_edits(SamplingParams(seed=0, top_k=4, min_p=0.1, logprobs=2, n=3))


@pytest.mark.parametrize(
    ("params", "field", "token"),
    [
        ({"logit_bias": {191222: 5.0}}, "logit_bias", 191222),
        ({"allowed_token_ids": [3, SIZE]}, "allowed_token_ids", SIZE),
        ({"stop_token_ids": [999999], "min_tokens": 4}, "stop_token_ids", 999999),
    ],
    ids=["bias", "allowed", "stop"],
)
def test_tokens_outside_the_vocabulary_are_refused(
    params: dict[str, Any], field: str, token: int
) -> None:
    with pytest.raises(InvalidRequestError, match=f"{token} is not in the vocabulary of") as caught:
        check_token_parameters(SamplingParams(**params), SIZE)
    assert caught.value.field == field
    assert caught.value.limit == f"[0, {SIZE - 1}]"


def test_tokens_of_the_vocabulary_are_accepted() -> None:
    params = SamplingParams(logit_bias={0: 1.0, SIZE - 1: 2.0}, allowed_token_ids=[SIZE - 1])
    check_token_parameters(params, SIZE)
