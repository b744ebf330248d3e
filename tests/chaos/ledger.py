"""What was submitted and what its readers saw, and the check of it; knows the SDK only."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from inferq import LLM, SamplingParams
from inferq.producer import AsyncClient
from inferq.protocol.errors import (
    InferqError,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    ResultTimeout,
    ServerLost,
    StreamExpired,
)

#: Two best logits closer than this may change places by rounding alone.
CLOSE_CALL = 1e-3
#: Seconds before and after a loss of the server's last writes in which what was told may be lost.
LOSS_WINDOW_S = 3.0


@dataclass
class Seen:
    """What one reader saw of a job."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    end: str | None = None
    ended_at: float = 0.0

    def take(self, event: Any) -> None:
        tokens = self.tokens.setdefault(event.index, [])
        if event.offset != len(tokens):
            raise BrokenPromise(f"{event.job_id}: offset {event.offset} after {len(tokens)} tokens")
        tokens += event.token_ids


@dataclass
class Entry:
    """One job as its producer knows it."""

    prompt: list[int]
    params: SamplingParams
    job_id: str = ""
    submitted_at: float = 0.0
    is_poison: bool = False
    cancelled: bool = False
    may_expire: bool = False
    live: Seen = field(default_factory=Seen)
    final: Seen = field(default_factory=Seen)


class BrokenPromise(Exception):
    """A token lost or told twice, a job without an end, or with two."""


async def follow(client: AsyncClient, job_id: str, seen: Seen, *, give_up_s: float) -> None:
    """Read a job from where `seen` stands to its end, whatever happens to the server."""
    give_up = time.monotonic() + give_up_s
    while seen.end is None:
        total = sum(map(len, seen.tokens.values()))
        try:
            stream = client.stream(job_id, from_offset=total, timeout_s=give_up_s)
            async for event in stream:
                seen.take(event)
            assert stream.terminal is not None
            seen.end = str(stream.terminal.finish_reason)
        except ServerLost:
            if time.monotonic() > give_up:
                raise
        except (JobFailed, JobCancelled, JobExpired, StreamExpired, JobNotFound) as error:
            seen.end = type(error).__name__
            if isinstance(error, JobFailed):
                seen.end = f"error: {error.info.code}"
        except ResultTimeout:
            seen.end = "none"
        seen.ended_at = time.monotonic()


def check_ends(entries: list[Entry], losses: list[float]) -> list[str]:
    """Return what is wrong with how the jobs ended; `losses` are times of lost writes."""

    def near_loss(*times: float) -> bool:
        return any(abs(at - loss) <= LOSS_WINDOW_S for at in times for loss in losses)

    wrong = []
    for entry in entries:
        live, final = entry.live, entry.final
        excused = near_loss(entry.submitted_at, live.ended_at)
        allowed = {"length"}
        if entry.cancelled:
            allowed.add("JobCancelled")
        if entry.may_expire:
            allowed.add("JobExpired")
        if entry.is_poison:
            allowed.add("error: worker_crashed")
        if excused:
            allowed |= {"JobNotFound", "StreamExpired"}
        for who, seen in (("live", live), ("final", final)):
            if seen.end not in allowed:
                wrong.append(f"{entry.job_id}: its {who} reader saw the end {seen.end!r}")
        if not excused and (live.end, live.tokens) != (final.end, final.tokens):
            wrong.append(f"{entry.job_id}: two readers saw different streams")
        wrong += _wrong_counts(entry)
    return wrong


def _wrong_counts(entry: Entry) -> list[str]:
    if entry.final.end != "length":
        return []
    counts = [len(tokens) for tokens in entry.final.tokens.values()]
    expected = [entry.params.max_tokens] * entry.params.n
    return [] if counts == expected else [f"{entry.job_id}: {counts} tokens, not {expected}"]


def check_texts(entries: list[Entry], model: str) -> tuple[list[str], int]:
    """Compare with an undisturbed run; return what is wrong, and how often rounding decided."""
    llm = LLM(model=model, max_model_len=256, num_kv_blocks=512, max_num_seqs=64)
    compared = [entry for entry in entries if any(entry.final.tokens.values())]
    outputs = llm.generate(
        [entry.prompt for entry in compared],
        [entry.params for entry in compared],
        use_tqdm=False,
    )
    wrong, close_calls = [], 0
    for entry, output in zip(compared, outputs, strict=True):
        for index, tokens in entry.final.tokens.items():
            expected = list(output.outputs[index].token_ids)[: len(tokens)]
            if tokens == expected:
                continue
            first = next(
                i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]
            )
            if entry.params.temperature == 0 and _is_close_call(llm, entry, tokens[:first]):
                close_calls += 1
            else:
                wrong.append(f"{entry.job_id}: output {index} differs from token {first} on")
    return wrong, close_calls


def _is_close_call(llm: LLM, entry: Entry, before: list[int]) -> bool:
    """Whether the two best next tokens are so close that the batch's rounding decides."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, ignore_eos=True)
    [output] = llm.generate([entry.prompt + before], params, use_tqdm=False)
    best = sorted((each.logprob for each in output.outputs[0].logprobs[0].values()), reverse=True)
    return best[0] - best[1] < CLOSE_CALL


__all__ = ["BrokenPromise", "Entry", "InferqError", "Seen", "check_ends", "check_texts", "follow"]
