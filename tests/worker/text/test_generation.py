"""The outputs of one request: each with its text and end; the best are chosen at the end."""

from __future__ import annotations

import pytest

from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.protocol.output_log import JobLog
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.token_output import TokenOutput
from inferq.worker.jobs.generation import Generation, num_streams
from inferq.worker.pipe.engine_output import EngineOutput
from inferq.worker.pipe.frames import decode_output, encode_output, pack, unpack


@pytest.fixture
def generate(make_tokenizer):
    """Start a generation whose tokens are letters; returns it and what makes tokens of a text."""
    tokenizer = make_tokenizer()

    def start(log: JobLog | None = None, **options) -> tuple[Generation, object]:
        params = SamplingParams(max_tokens=None, **options)
        log = log or JobLog(num_streams(params))
        return Generation(tokenizer, params, log), lambda text: tuple(tokenizer.encode(text))

    return start


def test_a_stop_string_ends_its_own_output_and_the_engine_must_be_told(generate) -> None:
    generation, ids = generate(n=2, stop=["bc"])
    assert not generation.receive(EngineOutput("r", 0, ids("ab")))
    assert not generation.receive(EngineOutput("r", 1, ids("xyz")))
    assert generation.receive(EngineOutput("r", 0, ids("cd")))
    first, second = generation.log.outputs
    assert (first.text, first.finish_reason, first.stop_reason) == ("a", FinishReason.STOP, "bc")
    assert first.token_ids == list(ids("abc"))
    assert not second.is_finished
    # what was on its way is dropped
    assert not generation.receive(EngineOutput("r", 0, ids("ef")))
    assert first.token_ids == list(ids("abc"))
    generation.receive(EngineOutput("r", 1, ids("b"), finish_reason=FinishReason.LENGTH))
    assert generation.is_finished
    # the beginning of a stop string was held back, and belongs to the text after all
    assert (second.text, second.finish_reason) == ("xyzb", FinishReason.LENGTH)
    assert generation.result().finish_reason is FinishReason.LENGTH


def test_a_stop_trims_ids_logprobs_and_text_together_and_their_sum(generate) -> None:
    generation, ids = generate(n=2, stop=["b"], logprobs=0)
    logprobs = tuple(TokenLogprob(-float(i)) for i in range(1, 5))
    generation.receive(EngineOutput("r", 0, ids("abcd"), logprobs, (-1.0, -3.0, -6.0, -10.0)))
    output = generation.log.outputs[0]
    assert output.token_ids == list(ids("ab"))
    assert output.logprobs == list(logprobs[:2])
    assert (output.text, output.cumulative_logprob) == ("a", -3.0)


def test_the_best_candidates_are_returned_by_the_tokens_they_keep(generate) -> None:
    generation, ids = generate(n=2, best_of=4, stop=["."])
    sums = [(-1.0, -9.0), (-2.0, -2.5), (-2.5, -2.5), (-0.5, -3.0)]
    for index, (first, both) in enumerate(sums):
        text = "a." if index else ".a"  # the first one keeps its first token only
        generation.receive(
            EngineOutput(
                "r",
                index,
                ids(text),
                cumulative_logprobs=(first, both),
                finish_reason=FinishReason.LENGTH,
            )
        )
    best = generation.result()
    assert [o.cumulative_logprob for o in best.outputs] == [-1.0, -2.5]
    assert [len(o.token_ids) for o in best.outputs] == [1, 2]
    # at a tie the lower candidate: 1, not 2
    assert best.outputs[1] is generation.log.outputs[1]
    assert best.total == 3


def test_beams_keep_the_order_and_the_sums_of_the_search(generate) -> None:
    generation, ids = generate(n=2, beam_width=4, stop=["c"])
    assert len(generation.log.outputs) == 2
    for index, total in enumerate([-5.0, -1.0]):
        step = TokenOutput(
            "r",
            ids("abcd"),
            finish_reason=FinishReason.LENGTH,
            index=index,
            cumulative_logprob=total,
            request_finished=index == 1,
        )
        generation.receive(EngineOutput.of_step(step))
    best = generation.result()
    assert [(o.text, o.cumulative_logprob) for o in best.outputs] == [("ab", -5.0), ("ab", -1.0)]
    assert [o.stop_reason for o in best.outputs] == ["c", "c"]


def test_an_early_end_closes_with_the_first_output_that_had_not_ended(generate) -> None:
    generation, ids = generate(n=3, stop=["xyz"])
    generation.receive(EngineOutput("r", 0, ids("a"), finish_reason=FinishReason.LENGTH))
    generation.receive(EngineOutput("r", 1, ids("bxy")))
    generation.receive(EngineOutput("r", 2, ids("c")))
    generation.end_early(FinishReason.CANCELLED)
    assert generation.log.closing == 1
    assert [o.finish_reason for o in generation.log.outputs] == ["length", "cancelled", None]
    assert generation.log.outputs[1].text == "bxy"


def test_a_replay_goes_on_as_if_nothing_had_happened(generate) -> None:
    whole, ids = generate(n=2, stop=["cd"])
    log = JobLog(2)
    for index, text in enumerate(["abc", "xc"]):
        whole.receive(EngineOutput("r", index, ids(text)))
    for _, event in whole.log.events(0, None):
        log.replay(event)
    resumed, _ = generate(log, n=2, stop=["cd"])
    for generation in (whole, resumed):
        assert generation.receive(EngineOutput("r", 0, ids("d")))
        generation.receive(EngineOutput("r", 1, ids("e"), finish_reason=FinishReason.LENGTH))
    for mine, theirs in zip(resumed.log.outputs, whole.log.outputs, strict=True):
        assert (mine.text, mine.token_ids, mine.finish_reason, mine.stop_reason) == (
            theirs.text,
            theirs.token_ids,
            theirs.finish_reason,
            theirs.stop_reason,
        )


def test_outputs_of_several_steps_merge_and_cross_the_pipe() -> None:
    steps = [
        TokenOutput(
            "r",
            (i,),
            (TokenLogprob(-0.5, ((i, -0.5),)),),
            index=3,
            cumulative_logprob=-0.5 * (i + 1),
            num_cached_tokens=16,
            prompt_logprobs=(None, TokenLogprob(-2.0)) if i == 0 else None,
            finish_reason=FinishReason.STOP if i == 2 else None,
            stop_reason=7 if i == 2 else None,
            request_finished=i == 2,
        )
        for i in range(3)
    ]
    merged = EngineOutput.of_step(steps[0])
    for step in steps[1:]:
        merged = merged.followed_by(EngineOutput.of_step(step))
    assert merged.token_ids == (0, 1, 2)
    assert merged.cumulative_logprobs == (-0.5, -1.0, -1.5)
    assert merged.prompt_logprobs == (None, TokenLogprob(-2.0))
    assert (merged.finish_reason, merged.request_finished) == (FinishReason.STOP, True)
    assert decode_output(unpack(pack(encode_output(merged)))) == merged
