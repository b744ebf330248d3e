"""Log-probabilities that no event could hold are refused, and those that are not refused fit."""

from __future__ import annotations

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.messages import (
    MAX_EVENT_BYTES,
    FinishReason,
    Job,
    Terminal,
    TextPrompt,
    TokenLogprob,
)
from inferq.protocol.output_log import JobLog
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.request import PreparedRequest
from inferq.worker.jobs.event_size import check_event_size
from inferq.worker.jobs.generation import describe_tokens

JOB = Job("0" * 32 + "-0", TextPrompt("x"), SamplingParams())


class Vocabulary:
    """As many tokens as a test wants, each of as many bytes."""

    def __init__(self, size: int, length: int = 7) -> None:
        self.size, self._text = size, b"x" * length
        self.total_token_bytes = size * length

    def token_bytes(self, _: int) -> bytes:
        return self._text


def check(vocabulary: Vocabulary, prompt_tokens: int, **params: int) -> PreparedRequest:
    ids = (vocabulary.size - 1 - i % vocabulary.size for i in range(prompt_tokens))
    prepared = PreparedRequest(tuple(ids), SamplingParams(max_tokens=1, **params))
    check_event_size(prepared, vocabulary, vocabulary.size)
    return prepared


def first_event_size(vocabulary: Vocabulary, prepared: PreparedRequest) -> int:
    """The size of the first event, with ids as large as the vocabulary has."""
    params = prepared.params

    def entry(wanted: int, at: int) -> TokenLogprob:
        count = vocabulary.size if wanted == -1 else wanted
        ids = (vocabulary.size - 1 - (at * count + i) % vocabulary.size for i in range(count))
        return TokenLogprob(-1.5, tuple((i, -2.5) for i in ids))

    log = JobLog()
    describe_tokens(log, prepared, JOB, vocabulary)
    if (wanted := params.prompt_logprobs) is not None:
        length = len(prepared.prompt_token_ids)
        log.prompt_logprobs = (None, *(entry(wanted, i) for i in range(1, length)))
    log.append(1, "x", None if params.logprobs is None else entry(params.logprobs, 0))
    [(_, event)] = log.events(0, Terminal(FinishReason.LENGTH))
    return len(event.encode())


@pytest.mark.parametrize("size", [49_152, 151_936, 262_144])
def test_the_whole_vocabulary_of_models_in_use_fits_an_event(size: int) -> None:
    vocabulary = Vocabulary(size)
    prepared = check(vocabulary, 10, logprobs=-1)
    assert first_event_size(vocabulary, prepared) <= MAX_EVENT_BYTES


def test_a_vocabulary_that_no_event_holds_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(Vocabulary(256_000, length=20), 10, logprobs=-1)
    assert caught.value.field == "logprobs"


@pytest.mark.parametrize(
    ("size", "params"),
    [
        (49_152, {"prompt_logprobs": 20}),
        (49_152, {"prompt_logprobs": -1}),
        (49_152, {"prompt_logprobs": -1, "logprobs": -1}),
        (151_936, {"prompt_logprobs": 20, "logprobs": 20}),
        (151_936, {"prompt_logprobs": 0}),
    ],
)
def test_the_longest_prompt_allowed_fits_its_event(size: int, params: dict[str, int]) -> None:
    vocabulary = Vocabulary(size)
    with pytest.raises(InvalidRequestError) as caught:
        check(vocabulary, 2**20, **params)
    assert caught.value.field == "prompt_logprobs"
    most = int(caught.value.limit or 0)
    assert most > 1
    with pytest.raises(InvalidRequestError):
        check(vocabulary, most + 1, **params)
    prepared = check(vocabulary, most, **params)
    size = first_event_size(vocabulary, prepared)
    assert MAX_EVENT_BYTES / 3 < size <= MAX_EVENT_BYTES


def test_what_was_not_asked_for_is_not_described() -> None:
    log = JobLog()
    describe_tokens(log, PreparedRequest((1, 2), SamplingParams(max_tokens=1)), JOB, Vocabulary(9))
    assert (log.token_bytes, log.prompt_token_ids) == (None, None)
