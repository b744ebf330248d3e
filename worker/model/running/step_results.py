"""From what was sampled to one result for each scheduled sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from inferq.protocol.errors import ErrorCode, ErrorInfo
from inferq.protocol.messages import TokenLogprob
from inferq.worker.engine.sampling.sampler import Samples, Unusable
from inferq.worker.engine.scheduling.plan import SampledToken, SequenceResult, StepPlan
from inferq.worker.model.running.step_inputs import StepSamples

_REASONS: Final = {
    Unusable.NOT_FINITE: ErrorInfo(ErrorCode.INTERNAL, "the model's logits are not finite"),
    Unusable.DEAD_END: ErrorInfo(
        ErrorCode.INVALID_REQUEST,
        "no token may follow the output so far: allowed_token_ids, structured_outputs, bad_words "
        "and min_tokens leave none",
    ),
}


def step_results(
    plan: StepPlan,
    step: StepSamples,
    samples: Samples | None,
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]],
) -> list[SequenceResult]:
    """Return one result for each scheduled sequence, in the plan's order.

    Sequences whose logits cannot be sampled get an error. `prompt_logprobs` are by index into the
    plan.
    """
    nothing = SequenceResult()
    sampled = iter(()) if samples is None else _results(step, samples)
    results = [next(sampled) if item.samples else nothing for item in plan.scheduled]
    for index, reports in prompt_logprobs.items():
        results[index] = replace(results[index], prompt_logprobs=reports)
    return results


def _results(step: StepSamples, samples: Samples) -> Iterator[SequenceResult]:
    results = _row_results(step, samples)
    if not (unusable := samples.unusable_rows):
        return results
    return (
        SequenceResult(error=_REASONS[unusable[row]]) if row in unusable else result
        for row, result in enumerate(results)
    )


def _row_results(step: StepSamples, samples: Samples) -> Iterator[SequenceResult]:
    tokens = _sampled_tokens(step, samples)
    asks = step.asks
    if asks is None or not (asks.beams or asks.children):
        return (SequenceResult((token,)) for token in tokens)
    beams = dict(zip((row for row, _ in asks.beams), samples.candidates, strict=True))
    counts = [1] * len(step.sampled) if asks.children is None else map(len, asks.children)
    places = iter(tokens)
    per_row = [tuple(islice(places, count)) for count in counts]
    return (
        SequenceResult(candidates=beams[row]) if row in beams else SequenceResult(row_tokens)
        for row, row_tokens in enumerate(per_row)
    )


def _sampled_tokens(step: StepSamples, samples: Samples) -> list[SampledToken]:
    if not any(samples.logprobs):
        return list(map(SampledToken, samples.token_ids))
    return [
        SampledToken(
            token,
            report if count >= 0 else None,
            None if report is None else report.logprob,
        )
        for token, report, count in zip(
            samples.token_ids, samples.logprobs, step.sampling.num_logprobs.tolist(), strict=True
        )
    ]
