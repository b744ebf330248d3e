"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from inferq.protocol.errors import ErrorInfo, InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.worker.engine.block_pool import BlockPool
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.ends import End, end_of
from inferq.worker.engine.plan import ModelRunner, SampledToken, SequenceResult, StepPlan
from inferq.worker.engine.request_checks import check_request
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.scheduler import Rejection, Scheduler
from inferq.worker.engine.sequence import EngineRequest, Sequence
from inferq.worker.engine.stats import EngineStats
from inferq.worker.engine.token_output import TokenOutput


__all__ = ["Engine", "TokenOutput"]


class Engine:
    """Continuous batching over one model runner; for one thread.

    A request ends with an end token (which is part of its output), at `max_tokens`, or with reason
    `length` when it reaches `max_model_len` or fills the whole KV cache. `on_step` sees each plan
    before it is computed, with its blocks allocated; it must not change anything.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        *,
        num_blocks: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        on_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._block_size = config.block_size
        self._pool = BlockPool(
            num_blocks, config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._scheduler = Scheduler(config, self._pool)
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        # the last token of a sequence is never computed, so it needs no room in the cache
        self._max_length = min(max_model_len, num_blocks * config.block_size + 1)
        self._on_step = on_step
        self._sequences: dict[str, Sequence] = {}
        #: What ended without being computed, until the next step reports it.
        self._uncomputed: dict[str, TokenOutput] = {}
        self._num_steps = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raise `InvalidRequestError` for one that can never be served.

        One whose output so far already ends it is reported by the next step, uncomputed.
        """
        if request.request_id in self._sequences or request.request_id in self._uncomputed:
            raise InvalidRequestError(
                f"{request.request_id!r} is in use", field="request_id", limit="unique"
            )
        check_request(request, max_model_len=self.max_model_len, vocab_size=self.vocab_size)
        sequence = Sequence(request, self._block_size)
        if end := end_of(sequence, self._eos_token_ids, self._max_length):
            self._uncomputed[request.request_id] = _output(sequence, None, end)
        else:
            self._sequences[request.request_id] = sequence
            self._scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request without further output and free its blocks; False if there is none."""
        if sequence := self._sequences.pop(request_id, None):
            self._scheduler.finish(sequence)
            return True
        return self._uncomputed.pop(request_id, None) is not None

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._sequences or self._uncomputed)

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return what is new; nothing to do returns nothing.

        A request that the runner names as failed ends with its error; the others' step is repeated.
        Any other exception of the runner's is passed on. The step then counts as not run, its
        blocks stay with their sequences and the books balance; whether the device can still be
        trusted, only the caller knows.
        """
        plan, rejected = self._scheduler.schedule()
        self._reject(rejected)
        try:
            results = self._execute(plan)
        except FailedRequestsError as error:
            self._fail(error)
            return self._collect(())
        self._scheduler.update(plan, results)
        return self._collect(
            (item.sequence, token)
            for item, result in zip(plan.scheduled, results, strict=True)
            for token in result.samples
        )

    def live_sequences(self) -> tuple[Sequence, ...]:
        """Return the waiting and running sequences, to look at."""
        return tuple(self._sequences.values())

    def stats(self) -> EngineStats:
        """Return the numbers of this moment; cheap enough for every step."""
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_used=pool.num_used,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            num_steps=self._num_steps,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is accounted for; O(blocks), between steps."""
        self._scheduler.check_integrity()

    def _reject(self, rejected: list[Rejection]) -> None:
        for sequence, error in rejected:
            request_id = sequence.request_id
            del self._sequences[request_id]
            self._uncomputed[request_id] = TokenOutput(
                request_id, finish_reason=FinishReason.ERROR, error=error, request_finished=True
            )

    def _fail(self, error: FailedRequestsError) -> None:
        for request_id, info in error.failed.items():
            self.abort(request_id)
            self._uncomputed[request_id] = TokenOutput(
                request_id, finish_reason=FinishReason.ERROR, error=info, request_finished=True
            )

    def _execute(self, plan: StepPlan) -> SequenceOf[SequenceResult]:
        if not plan.scheduled:
            return ()
        if self._on_step is not None:
            self._on_step(plan)
        results = self._runner.execute(plan)
        self._num_steps += 1
        return results

    def _collect(self, sampled: Iterable[tuple[Sequence, SampledToken]]) -> list[TokenOutput]:
        outputs = list(self._uncomputed.values())
        self._uncomputed.clear()
        for sequence, token in sampled:
            end = end_of(sequence, self._eos_token_ids, self._max_length)
            outputs.append(_output(sequence, token, end))
            if end is not None:
                self._scheduler.finish(sequence)
                del self._sequences[sequence.request_id]
        return outputs


def _output(sequence: Sequence, token: SampledToken | None, end: End | None) -> TokenOutput:
    return TokenOutput(
        sequence.request_id,
        () if token is None else (token.token_id,),
        None if token is None or token.logprob is None else (token.logprob,),
        None if end is None else end.finish_reason,
        None if end is None else end.stop_reason,
        sequence.num_cached_tokens,
        request_finished=end is not None,
    )
