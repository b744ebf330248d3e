"""A stand-in for the model that checks every plan against a simulated KV cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine, TokenOutput
from inferq.worker.engine.plan import SampledToken, SequenceResult, StepPlan
from inferq.worker.engine.sequence import EngineRequest, Sequence

VOCAB_SIZE = 61
EOS = 2
_MASK = 2**64 - 1


def _mix(state: int, token_id: int) -> int:
    """The state after one more token: stands for a token's KV, which depends on all before it."""
    state = (state ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & _MASK
    return state ^ (state >> 29)


def _next_token(state: int) -> int:
    return (state >> 17) % VOCAB_SIZE


class SimulatedRunner:
    """Keeps the state of each token in its block's slot, and reads contexts through block tables.

    A wrong prefix hit, a block used after it was freed or written by two sequences, or a context
    that was never computed shows as a state that differs from the one of the sequence's tokens.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.computed_tokens = 0
        self.fail_next = False
        self._states: dict[Sequence, list[int]] = {}

    def execute(self, plan: StepPlan) -> list[SequenceResult]:
        if self.fail_next:
            self.fail_next = False
            raise OSError("the device fell off the bus")
        contexts = [self._read_context(item.sequence) for item in plan.scheduled]
        results = []
        for item, state in zip(plan.scheduled, contexts, strict=True):
            state = self._write(item.sequence, item.num_tokens, state)
            tokens = (SampledToken(_next_token(state)),) if item.samples else ()
            results.append(SequenceResult(tokens))
        self.computed_tokens += plan.num_tokens
        return results

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
            state = _mix(state, sequence.token_ids[position])
            block, offset = divmod(position, self.block_size)
            self.cache[sequence.block_table[block]][offset] = state
        return state

    def _expected(self, sequence: Sequence) -> list[int]:
        states = self._states.setdefault(sequence, [])
        for token_id in sequence.token_ids[len(states) :]:
            states.append(_mix(states[-1] if states else 0, token_id))
        return states


@dataclass
class Answer:
    """All that came out for one request."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenOutput | None = None


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
        enable_prefix_caching: bool = True,
        eos: frozenset[int] = frozenset({EOS}),
    ) -> None:
        self.config = EngineConfig(
            model="simulated",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.runner = SimulatedRunner(num_blocks, block_size)
        self.eos = eos
        self.max_length = min(max_model_len, num_blocks * block_size + 1)
        self.engine = Engine(
            self.config,
            self.runner,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            eos_token_ids=eos,
            vocab_size=VOCAB_SIZE,
            on_step=self._check_plan,
        )
        self.plans: list[list[tuple[str, int]]] = []
        self.answers: dict[str, Answer] = {}
        self.requests: dict[str, EngineRequest] = {}

    def add(self, request_id: str, prompt: list[int], **options: object) -> EngineRequest:
        """Queue a request; options of EngineRequest by name, all others are sampling parameters."""
        own = {
            name: options.pop(name)
            for name in ("output_token_ids", "priority", "arrival", "cache_salt")
            if name in options
        }
        own.setdefault("arrival", float(len(self.requests)))
        params = SamplingParams(**{"seed": 0, "temperature": 0.0, **options})
        request = EngineRequest(
            request_id=request_id, prompt_token_ids=tuple(prompt), params=params, **own
        )
        self.engine.add_request(request)
        self.requests[request_id] = request
        self.answers[request_id] = Answer()
        return request

    def step(self) -> list[TokenOutput]:
        outputs = self.engine.step()
        for output in outputs:
            answer = self.answers[output.request_id]
            assert answer.last is None or answer.last.finish_reason is None, "output after the end"
            answer.token_ids += output.token_ids
            answer.last = output
        self.check_books()
        return outputs

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps: {self.engine.stats()}")

    def check_books(self) -> None:
        self.engine.check_integrity()
        stats = self.engine.stats()
        used = {b for s in self.engine.live_sequences() for b in s.block_table}
        assert stats.blocks_used == len(used)
        assert stats.blocks_free + stats.blocks_used == stats.blocks_total
        assert stats.blocks_cached <= stats.blocks_free
        assert stats.num_running + stats.num_waiting == len(self.engine.live_sequences())

    def check_pool_is_whole(self) -> None:
        stats = self.engine.stats()
        assert (stats.blocks_used, stats.blocks_free) == (0, stats.blocks_total)
        self.engine.check_integrity()

    def expected(self, request_id: str) -> tuple[list[int], FinishReason, int | None]:
        """What the request answers when nothing disturbs it: worked out without an engine."""
        request = self.requests[request_id]
        params, output = request.params, list(request.output_token_ids)
        state = 0
        for token_id in (*request.prompt_token_ids, *output):
            state = _mix(state, token_id)
        while not (end := self._end(request, output)):
            output.append(_next_token(state))
            state = _mix(state, output[-1])
        by_eos = output[-1] in self.eos and not params.ignore_eos
        stop = output[-1] if end is FinishReason.STOP and not by_eos else None
        return output[len(request.output_token_ids) :], end, stop

    def check_answer(self, request_id: str) -> None:
        answer, (token_ids, reason, stop) = self.answers[request_id], self.expected(request_id)
        assert answer.token_ids == token_ids, request_id
        assert answer.last is not None
        assert (answer.last.finish_reason, answer.last.stop_reason) == (reason, stop), request_id

    def _end(self, request: EngineRequest, output: list[int]) -> FinishReason | None:
        params = request.params
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos)
        if output and len(output) >= params.min_tokens and output[-1] in stops:
            return FinishReason.STOP
        length = len(request.prompt_token_ids) + len(output)
        enough = params.max_tokens is not None and len(output) >= params.max_tokens
        return FinishReason.LENGTH if output and (enough or length >= self.max_length) else None

    def _check_plan(self, plan: StepPlan) -> None:
        size = self.config.block_size
        live = self.engine.live_sequences()
        owners = Counter(block for s in live for block in s.block_table)
        assert plan.scheduled, "an empty plan reached the runner"
        assert len({item.sequence for item in plan.scheduled}) == len(plan.scheduled)
        assert self.engine.stats().num_running <= self.config.max_num_seqs
        counts = [item.num_tokens for item in plan.scheduled]
        assert sum(counts) == plan.num_tokens <= self.config.max_num_batched_tokens
        assert all(c == 1 for c in counts[: plan.num_decodes])
        assert all(c > 1 for c in counts[plan.num_decodes :])
        for item in plan.scheduled:
            sequence, end = item.sequence, item.sequence.num_computed_tokens + item.num_tokens
            assert sequence in live
            assert end <= sequence.num_tokens
            assert len(sequence.block_table) == -(-end // size)
            written = sequence.block_table[sequence.num_computed_tokens // size :]
            assert all(owners[block] == 1 for block in written), "a shared block is written"
        in_plan = {item.sequence for item in plan.scheduled}
        for sequence in live:
            if sequence not in in_plan:
                assert len(sequence.block_table) == -(-sequence.num_computed_tokens // size)
        self.plans.append([(item.sequence.request_id, item.num_tokens) for item in plan.scheduled])


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    """The class: each test makes the engine it needs."""
    return Simulation
