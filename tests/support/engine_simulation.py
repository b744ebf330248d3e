"""A stand-in for the model that checks every plan against a simulated KV cache."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from inferq.protocol.messages import FinishReason, TokenLogprob
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine, TokenOutput
from inferq.worker.engine.requests.beam import BeamSearch
from inferq.worker.engine.requests.sequence import (
    EngineRequest,
    ResumedOutput,
    Sequence,
    SequenceStatus,
)
from inferq.worker.engine.scheduling.plan import (
    UNKNOWN_TOKEN,
    BeamCandidates,
    RunnerSpeeds,
    SampledToken,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
)
from inferq.worker.engine.scheduling.preemption import ForcedPreemption
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit
from inferq.worker.engine.stats import EngineStats

VOCAB_SIZE = 61
EOS = 2
_MASK = 2**64 - 1


def _mix(state: int, token_id: int) -> int:
    """The state after one more token: stands for a token's KV, which depends on all before it."""
    state = (state ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


def next_token(state: int, child: int = 0) -> int:
    """What is sampled after a token list: children differ, as by their noise."""
    return ((_mix(state, child) if child else state) >> 17) % VOCAB_SIZE


def logprob_of(state: int, token_id: int) -> float:
    """The simulated model's log-probability of a token; not normalized."""
    return -((_mix(state, token_id) >> 23) % 997) / 100


def beam_candidates(state: int, count: int) -> BeamCandidates:
    """The likeliest tokens after a token list."""
    ranked = sorted((-logprob_of(state, token), token) for token in range(VOCAB_SIZE))[:count]
    return BeamCandidates(tuple(t for _, t in ranked), tuple(-cost for cost, _ in ranked))


class SimulatedRunner:
    """Keeps the state of each token in its block's slot, and reads contexts through block tables.

    A wrong prefix hit, a block used after it was freed or written by two sequences, a context that
    was never computed, or one copied or swapped from or to the wrong place shows as a state that
    differs from the one of the sequence's tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, num_swap_blocks: int = 0) -> None:
        self.block_size = block_size
        self.cache: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[int | None]] = [[None] * block_size for _ in range(num_swap_blocks)]
        self.computed_tokens = 0
        self.num_copies = 0
        self.fail_next = False
        #: Whether a failure is seen only when the step's results are asked for.
        self.fails_late = False
        #: Steps launched after such a failure, until it is seen, find no device.
        self.is_lost = False
        self._sampled: dict[Sequence, int] = {}
        self._states: dict[Sequence, list[int]] = {}

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """The device works in order, so that its work may as well be done here."""
        if self.is_lost:
            return SimulatedStep(self, None)
        if self.fail_next and self.fails_late:
            self.fail_next, self.is_lost = False, True
            return SimulatedStep(self, None)
        return SimulatedStep(self, self.execute(plan))

    def find_device(self) -> None:
        self.is_lost = False

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        if self.fail_next:
            self.fail_next = False
            raise OSError("the device fell off the bus")
        self._move(plan)
        contexts = [self._read_context(item.sequence) for item in plan.scheduled]
        results = [
            self._compute(item, state) for item, state in zip(plan.scheduled, contexts, strict=True)
        ]
        self.computed_tokens += plan.num_tokens
        self._sampled = {
            item.sequence: result.samples[0].token_id
            for item, result in zip(plan.scheduled, results, strict=True)
            if len(result.samples) == 1
        }
        return results

    def _move(self, plan: StepPlan) -> None:
        assert not (plan.swap_out and plan.swap_in), "blocks move in both directions"
        for moves in (plan.swap_out, plan.swap_in, plan.block_copies):
            targets = [move.target for move in moves]
            assert len(set(targets)) == len(targets), "a block is the target of two moves"
        sources = {copy.source for copy in plan.block_copies}
        assert sources.isdisjoint(copy.target for copy in plan.block_copies)
        for source, target in plan.swap_out:
            self.host[target] = self.cache[source].copy()
        for source, target in plan.swap_in:
            self.cache[target] = self.host[source].copy()
        for source, target in plan.block_copies:
            self.cache[target] = self.cache[source].copy()
        self.num_copies += len(plan.block_copies)

    def _compute(self, item: ScheduledSequence, state: int) -> SequenceResult:
        sequence, params = item.sequence, item.sequence.params
        first, samples = sequence.num_computed_tokens, item.samples
        state = self._write(sequence, item.num_tokens, state)
        prompt_logprobs = ()
        if params.prompt_logprobs is not None:
            known = self._expected(sequence)
            last = min(first + item.num_tokens, sequence.num_prompt_tokens - 1)
            prompt_logprobs = tuple(
                TokenLogprob(logprob_of(known[p], sequence.token_ids[p + 1]), ())
                for p in range(first, last)
            )
        if samples and params.beam_width is not None:
            candidates = beam_candidates(state, item.num_candidates)
            return SequenceResult((), candidates, prompt_logprobs)
        tokens = []
        for child in (item.children or (sequence.child_index,)) if samples else ():
            token_id = next_token(state, child)
            ranked = params.logprobs is not None or params.num_candidates > params.n
            tokens.append(
                SampledToken(token_id, None, logprob_of(state, token_id) if ranked else None)
            )
        return SequenceResult(tuple(tokens), None, prompt_logprobs)

    def _read_context(self, sequence: Sequence) -> int:
        size, states = self.block_size, self._expected(sequence)
        for start in range(0, sequence.num_computed_tokens, size):
            expected = states[start : min(start + size, sequence.num_computed_tokens)]
            block = self.cache[sequence.block_table[start // size]]
            assert block[: len(expected)] == expected, f"wrong context at {start} of {sequence}"
        return states[sequence.num_computed_tokens - 1] if sequence.num_computed_tokens else 0

    def _write(self, sequence: Sequence, num_tokens: int, state: int) -> int:
        start = sequence.num_computed_tokens
        for position in range(start, start + num_tokens):
            state = _mix(state, self._token(sequence, position))
            block, offset = divmod(position, self.block_size)
            self.cache[sequence.block_table[block]][offset] = state
        return state

    def _token(self, sequence: Sequence, position: int) -> int:
        """The token there: one that the host does not know is what the step before sampled."""
        token_id = sequence.token_ids[position]
        if token_id != UNKNOWN_TOKEN:
            return token_id
        assert position == len(sequence.token_ids) - 1, "only the last token may be unknown"
        return self._sampled[sequence]

    def _expected(self, sequence: Sequence) -> list[int]:
        states = self._states.setdefault(sequence, [])
        for position in range(len(states), len(sequence.token_ids)):
            token_id = self._token(sequence, position)
            states.append(_mix(states[-1] if states else 0, token_id))
        return states


@dataclass
class SimulatedStep:
    """A launched step; without results it has failed."""

    runner: SimulatedRunner
    found: list[SequenceResult] | None

    def results(self) -> list[SequenceResult]:
        if self.found is None:
            self.runner.find_device()
            raise OSError("the device fell off the bus")
        return self.found


@dataclass
class Answer:
    """All that came out for one output of a request."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenOutput | None = None
    prompt_logprobs: list[tuple] = field(default_factory=list)


class Expected(NamedTuple):
    """What an output is when nothing disturbs it."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | None
    cumulative_logprob: float | None = None
    score: float | None = None


class FixedLimit(PromptLimit):
    """A limit that learns nothing from how long the tests take."""

    tokens = 0

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def learn(self, **step: object) -> None:
        """Stay as it is."""


class Simulation:
    """An engine on the stand-in runner whose books are checked before and after every step."""

    def __init__(
        self,
        num_blocks: int,
        *,
        max_model_len: int = 4096,
        block_size: int = 4,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 64,
        num_swap_blocks: int = 0,
        speeds: RunnerSpeeds | None = None,
        eos: frozenset[int] = frozenset({EOS}),
        launches_ahead: bool = False,
        max_prompt_tokens: int | None = None,
        **options: object,
    ) -> None:
        self.config = EngineConfig(
            model="simulated",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **options,
        )
        self.runner = SimulatedRunner(num_blocks, block_size, num_swap_blocks)
        self.eos = eos
        self.max_length = min(max_model_len, num_blocks * block_size + 1)
        #: (request id, child index, by_swap) to preempt before the next step
        self.to_preempt: list[tuple[str, int, bool]] = []
        self.engine = Engine(
            self.config,
            self.runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            vocab_size=VOCAB_SIZE,
            num_swap_blocks=num_swap_blocks,
            speeds=speeds,
            on_step=self._check_plan,
            preemption_hook=self._preempt,
            launches_ahead=launches_ahead,
            prompt_limit=None if max_prompt_tokens is None else FixedLimit(max_prompt_tokens),
        )
        self.has_failed = False
        self.plans: list[list[tuple[str, int]]] = []
        self.step_plans: list[StepPlan] = []
        self.outputs: dict[tuple[str, int], Answer] = {}
        self.finished: set[str] = set()
        self.requests: dict[str, EngineRequest] = {}

    @property
    def answers(self) -> dict[str, Answer]:
        """The first output of each request."""
        return {name: self.output(name) for name in self.requests}

    def output(self, request_id: str, index: int = 0) -> Answer:
        return self.outputs.setdefault((request_id, index), Answer())

    def add(self, request_id: str, prompt: list[int], **options: object) -> EngineRequest:
        """Queue a request; options of EngineRequest by name, all others are sampling parameters."""
        own = {
            name: options.pop(name)
            for name in ("resumed", "priority", "arrival", "cache_salt", "traced")
            if name in options
        }
        if published := options.pop("published", None):
            own["resumed"] = (ResumedOutput(tuple(published)),)
        own.setdefault("arrival", float(len(self.requests)))
        many = options.get("n", 1) > 1 or options.get("best_of") or options.get("beam_width")
        params = SamplingParams(**{"seed": 0, "temperature": float(bool(many)), **options})
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **own
        )
        self.engine.add_request(request)
        self.requests[request_id] = request
        self.finished.discard(request_id)
        for key in [key for key in self.outputs if key[0] == request_id]:
            del self.outputs[key]
        return request

    def step(self) -> list[TokenOutput]:
        outputs = self.engine.step()
        for output in outputs:
            answer = self.output(output.request_id, output.index)
            assert answer.last is None or answer.last.finish_reason is None, "output after the end"
            assert output.request_id not in self.finished, "output after the request's end"
            answer.token_ids += output.token_ids
            answer.last = output
            if output.prompt_logprobs is not None:
                answer.prompt_logprobs.append(output.prompt_logprobs)
            if output.request_finished:
                self.finished.add(output.request_id)
        self.check_books()
        return outputs

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.engine.stats()}")

    def run_until(self, condition: Callable[[EngineStats], bool]) -> None:
        while not condition(self.engine.stats()):
            assert self.engine.has_work(), "ended before it came to that"
            self.step()

    def preempt(self, request_id: str, index: int = 0, *, by_swap: bool = False) -> None:
        """Disturb the next step."""
        self.to_preempt.append((request_id, index, by_swap))

    def fail_one_step(self, *, late: bool = False) -> None:
        self.runner.fail_next = self.has_failed = True
        self.runner.fails_late = late
        with contextlib.suppress(OSError):  # a step with nothing to do does not reach the runner
            self.step()
        self.runner.fail_next = self.runner.fails_late = False
        if self.runner.is_lost:
            with contextlib.suppress(OSError):
                self.step()
        assert not self.runner.is_lost

    def check_books(self) -> None:
        self.engine.check_integrity()
        stats, live = self.engine.stats(), self.engine.live_sequences()
        assert stats.blocks_used == len({b for s in live for b in s.block_table})
        assert stats.swap_blocks_used == len({b for s in live for b in s.host_table})
        assert stats.blocks_free + stats.blocks_used == stats.blocks_total
        assert stats.blocks_cached <= stats.blocks_free
        assert stats.num_running + stats.num_waiting + stats.num_swapped == len(live)

    def check_pool_is_whole(self) -> None:
        stats = self.engine.stats()
        assert (stats.blocks_used, stats.blocks_free) == (0, stats.blocks_total)
        assert stats.swap_blocks_used == 0
        self.engine.check_integrity()

    def expected(self, request_id: str, index: int = 0) -> Expected:
        """What the output is when nothing disturbs it: worked out without an engine."""
        request = self.requests[request_id]
        if request.params.beam_width is not None:
            return self.expected_beams(request_id)[index]
        params = request.params
        resumed = request.resumed[index].token_ids if index < len(request.resumed) else ()
        output = list(resumed)
        total = 0.0
        state = fold((*request.prompt_token_ids, *output))
        while not (end := self._end(request, output)):
            output.append(next_token(state, index))
            total += logprob_of(state, output[-1])
            state = _mix(state, output[-1])
        by_eos = output[-1] in self.eos and not params.ignore_eos
        stop = output[-1] if end is FinishReason.STOP and not by_eos else None
        ranked = params.logprobs is not None or params.num_candidates > params.n
        known = ranked and not resumed
        return Expected(output[len(resumed) :], end, stop, total if known else None)

    def expected_beams(self, request_id: str) -> list[Expected]:
        """The search without an engine; it ends where its beams outgrow the whole pool."""
        request = self.requests[request_id]
        params, size = request.params, self.config.block_size
        room = self.max_length - len(request.prompt_token_ids)
        limit = min(room, params.max_tokens or room)
        search = BeamSearch(params, eos_token_ids=self.eos, max_new_tokens=limit)
        count = 2 * params.beam_width + len(params.stop_token_ids) + 1
        beams = [tuple(request.prompt_token_ids)]
        while not search.is_done:
            survivors = search.advance([beam_candidates(fold(b), count) for b in beams]).survivors
            beams = [(*beams[s.parent], s.token_id) for s in survivors]
            full = {b[: k + size] for b in beams for k in range(0, len(b) - size, size)}
            if beams and len(full) + len(beams) > len(self.runner.cache):
                search.stop()
        return [
            Expected(
                list(h.token_ids), h.finish_reason, h.stop_reason, h.cumulative_logprob, h.score
            )
            for h in search.hypotheses()
        ]

    def check_answer(self, request_id: str, index: int | None = None) -> None:
        """Compare all outputs of a request, or one, with the undisturbed run."""
        request = self.requests[request_id]
        params = request.params
        if index is None:
            count = params.n if params.beam_width else params.num_candidates
            for each in range(count):
                if each >= len(request.resumed) or not request.resumed[each].is_finished:
                    self.check_answer(request_id, each)
            assert request_id in self.finished, request_id
            return
        answer, expected = self.output(request_id, index), self.expected(request_id, index)
        last = answer.last
        assert last is not None, (request_id, index)
        assert answer.token_ids == expected.token_ids, (request_id, index)
        assert (last.finish_reason, last.stop_reason) == expected[1:3], (request_id, index)
        if answer.token_ids:
            assert last.cumulative_logprob == expected.cumulative_logprob
            assert last.score == expected.score
        self._check_prompt_logprobs(request, index)

    def _check_prompt_logprobs(self, request: EngineRequest, index: int) -> None:
        resumed = request.resumed and request.resumed[0].token_ids
        wanted = request.params.prompt_logprobs is not None and index == 0 and not resumed
        prompt = request.prompt_token_ids
        values = [
            TokenLogprob(logprob_of(fold(prompt[:p]), prompt[p]), ()) for p in range(1, len(prompt))
        ]
        expected = [(None, *values)] if wanted else []
        assert self.output(request.request_id, index).prompt_logprobs == expected

    def _end(self, request: EngineRequest, output: list[int]) -> FinishReason | None:
        params = request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        if output and len(output) >= params.min_tokens and output[-1] in stops:
            return FinishReason.STOP
        length = len(request.prompt_token_ids) + len(output)
        enough = params.max_tokens is not None and len(output) >= params.max_tokens
        return FinishReason.LENGTH if output and (enough or length >= self.max_length) else None

    def _preempt(self, running: tuple[Sequence, ...]) -> list[ForcedPreemption]:
        wanted = {(name, index): by_swap for name, index, by_swap in self.to_preempt}
        self.to_preempt.clear()
        return [
            ForcedPreemption(s, wanted[s.request_id, s.child_index])
            for s in running
            if (s.request_id, s.child_index) in wanted
        ]

    def _check_plan(self, plan: StepPlan) -> None:
        size = self.config.block_size
        live = self.engine.live_sequences()
        owners = Counter(block for s in live for block in s.block_table)
        assert plan.scheduled or plan.swap_out, "an empty plan reached the runner"
        assert len({item.sequence for item in plan.scheduled}) == len(plan.scheduled)
        running = [s for s in live if s.status is SequenceStatus.RUNNING]
        assert sum(s.num_slots for s in running) <= self.config.max_num_seqs
        counts = [item.num_tokens for item in plan.scheduled]
        assert sum(counts) == plan.num_tokens <= self.config.max_num_batched_tokens
        assert all(c == 1 for c in counts[: plan.num_decodes])
        assert all(c > 1 for c in counts[plan.num_decodes :])
        for item in plan.scheduled:
            sequence, end = item.sequence, item.sequence.num_computed_tokens + item.num_tokens
            assert sequence in running
            assert end <= sequence.num_tokens
            assert len(sequence.block_table) * size >= end
            assert self.has_failed or len(sequence.block_table) == -(-end // size)
            written = sequence.block_table[sequence.num_computed_tokens // size :]
            assert all(owners[block] == 1 for block in written), "a shared block is written"
        for s in set(running) - {item.sequence for item in plan.scheduled}:
            assert self.has_failed or len(s.block_table) == -(-s.num_computed_tokens // size)
        self._check_beams(live, plan)
        self.plans.append([(item.sequence.request_id, item.num_tokens) for item in plan.scheduled])
        self.step_plans.append(plan)

    @staticmethod
    def _check_beams(live: tuple[Sequence, ...], plan: StepPlan) -> None:
        """All beams of a search stand in the same queue, and sample together or not at all."""
        sampling = {item.sequence for item in plan.scheduled if item.samples}
        for group in {s.group for s in live if s.params.beam_width is not None}:
            assert len({s.status for s in group.sequences}) == 1
            assert len({s in sampling for s in group.sequences}) == 1


def fold(token_ids: Iterable[int]) -> int:
    """The state after a token list."""
    return functools.reduce(_mix, token_ids, 0)
