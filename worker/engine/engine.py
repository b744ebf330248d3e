"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import count

from inferq.protocol.errors import ErrorInfo, InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.worker.engine.block_pool import BlockPool
from inferq.worker.engine.collector import Collector
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.ends import end_of
from inferq.worker.engine.group import SequenceGroup
from inferq.worker.engine.host_pool import HostPool
from inferq.worker.engine.plan import ModelRunner, RunnerSpeeds, SequenceResult, StepPlan
from inferq.worker.engine.preemption import PreemptionHook
from inferq.worker.engine.request_checks import check_request
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.scheduler import Scheduler
from inferq.worker.engine.sequence import EngineRequest, Sequence
from inferq.worker.engine.stats import EngineStats
from inferq.worker.engine.token_output import TokenOutput

__all__ = ["Engine", "TokenOutput"]


class Engine:
    """Continuous batching over one model runner; for one thread.

    An output ends with an end token (which is part of it), at `max_tokens`, or with reason `length`
    when it reaches `max_model_len` or fills the whole KV cache. A request has `n` or `best_of`
    outputs, each of which is reported as it grows, or the best `n` beams, reported when the search
    has ended. `on_step` sees each plan before it is computed, with its blocks allocated; it must
    not change anything. `preemption_hook` may disturb the schedule, never the tokens.

    Without `enable_prefix_caching` each request gets a private salt: its sequences still find the
    blocks that they share when they are computed again, and nobody else's.
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
        num_swap_blocks: int = 0,
        speeds: RunnerSpeeds | None = None,
        on_step: Callable[[StepPlan], None] | None = None,
        preemption_hook: PreemptionHook | None = None,
    ) -> None:
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._config = config
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        # the last token of a sequence is never computed, so it needs no room in the cache
        self._max_length = min(max_model_len, num_blocks * config.block_size + 1)
        self._pool = BlockPool(num_blocks, config.block_size)
        self._scheduler = Scheduler(
            config,
            self._pool,
            HostPool(num_swap_blocks),
            speeds=speeds,
            preemption_hook=preemption_hook,
        )
        self._collector = Collector(
            self._scheduler.residency, eos_token_ids=eos_token_ids, max_length=self._max_length
        )
        self._on_step = on_step
        self._groups: dict[str, SequenceGroup] = {}
        #: What ended without being computed, until the next step reports it.
        self._uncomputed: dict[str, list[TokenOutput]] = {}
        self._private_salts = count()
        self._num_steps = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raise `InvalidRequestError` for one that can never be served.

        Outputs that are already complete with their resumed tokens are reported by the next step,
        uncomputed.
        """
        if request.request_id in self._groups or request.request_id in self._uncomputed:
            raise InvalidRequestError(
                f"{request.request_id!r} is in use", field="request_id", limit="unique"
            )
        check_request(
            request,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            max_num_seqs=self._config.max_num_seqs,
        )
        if not self._config.enable_prefix_caching:
            # no salt of a request's own is used then, so that these cannot meet any
            salt = f"private {next(self._private_salts)}"
            request = dataclasses.replace(request, cache_salt=salt)
        group = SequenceGroup(
            request,
            self._config.block_size,
            eos_token_ids=self._eos_token_ids,
            max_length=self._max_length,
        )
        if complete := self._take_complete(group):
            self._uncomputed[group.request_id] = complete
        if group.sequences:
            self._groups[group.request_id] = group
            self._scheduler.add(group)

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one output of it, without further output; free its blocks at once.

        False if there is none. Outputs of a beam search are not known before it has ended, so that
        only the whole can be aborted.
        """
        if index is not None:
            return self._abort_output(request_id, index)
        reported = self._uncomputed.pop(request_id, None)
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._collector.drop(group)
        return group is not None or reported is not None

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._groups or self._uncomputed)

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return what is new; nothing to do returns nothing.

        A request that the runner names as failed ends with its error; the others' step is repeated.
        Any other exception of the runner's is passed on. The step then counts as not run, its
        blocks stay with their sequences, except that sequences whose blocks were to be moved are
        computed again, and the books balance; whether the device can still be trusted, only the
        caller knows.
        """
        plan, rejected = self._scheduler.schedule()
        for group, info in rejected:
            self._end_with_error(group.request_id, info)
        try:
            results = self._execute(plan)
        except FailedRequestsError as error:
            self._scheduler.confirm_moves()
            for request_id, info in error.failed.items():
                self._end_with_error(request_id, info)
            return self._take_uncomputed()
        except BaseException:
            self._scheduler.abandon_moves()
            raise
        self._scheduler.confirm_moves()
        return self._take_uncomputed() + self._update(plan, results)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return whether no request holds blocks any more.

        Blocks in use are forgotten too: they serve those who have them to the end, and no others.
        """
        return self._scheduler.reset_prefix_cache()

    def live_sequences(self) -> tuple[Sequence, ...]:
        """Return the waiting, swapped and running sequences, to look at."""
        return tuple(s for group in self._groups.values() for s in group.sequences)

    def stats(self) -> EngineStats:
        """Return the numbers of this moment; cheap enough for every step."""
        scheduler, pool, residency = self._scheduler, self._pool, self._scheduler.residency
        return EngineStats(
            num_running=len(residency.running),
            num_waiting=len(residency.waiting),
            num_swapped=len(residency.swapped),
            blocks_total=pool.num_blocks,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached if self._config.enable_prefix_caching else 0,
            blocks_used=pool.num_used,
            swap_blocks_total=residency.host.num_blocks,
            swap_blocks_used=residency.host.num_used,
            num_preemptions=scheduler.preemption.num_preemptions,
            num_swaps=scheduler.preemption.num_swaps,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            num_steps=self._num_steps,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is accounted for; O(blocks), between steps."""
        self._scheduler.residency.check_integrity()

    def _execute(self, plan: StepPlan) -> SequenceOf[SequenceResult]:
        if not (plan.scheduled or plan.swap_out):
            return ()
        if self._on_step is not None:
            self._on_step(plan)
        results = self._runner.execute(plan)
        self._num_steps += 1
        return results

    def _update(self, plan: StepPlan, results: SequenceOf[SequenceResult]) -> list[TokenOutput]:
        for item, result in zip(plan.scheduled, results, strict=True):
            if item.samples != bool(result.samples or result.candidates):
                raise RuntimeError(f"{item}: the runner gave {result}")
            if result.prompt_logprobs:
                item.sequence.group.collect_prompt_logprobs(
                    item.sequence.num_computed_tokens, result.prompt_logprobs
                )
        for item in plan.scheduled:
            self._scheduler.advance(item)
        outputs = self._collector.collect(plan, results)
        for output in outputs:
            if output.request_finished:
                del self._groups[output.request_id]
        return outputs

    def _take_complete(self, group: SequenceGroup) -> list[TokenOutput]:
        """Take the resumed outputs that have ended out of the group and report them."""
        complete: list[TokenOutput] = []
        for sequence in list(group.sequences):
            if end := end_of(sequence, self._eos_token_ids, self._max_length):
                group.sequences.remove(sequence)
                output = TokenOutput(
                    group.request_id,
                    finish_reason=end.finish_reason,
                    stop_reason=end.stop_reason,
                    index=sequence.child_index,
                    request_finished=not group.sequences,
                )
                complete.append(output)
        if not (complete or group.sequences):
            # all ends were published: there is only the request's own end to tell
            complete.append(TokenOutput(group.request_id, request_finished=True))
        return complete

    def _abort_output(self, request_id: str, index: int) -> bool:
        group = self._groups.get(request_id)
        reported = self._uncomputed.pop(request_id, [])
        kept = [output for output in reported if output.index != index or output.error]
        found = len(kept) < len(reported)
        if not found and group is not None:
            found = self._collector.drop_output(group, index)
            if not group.sequences:
                del self._groups[request_id]
        if kept:
            if request_id not in self._groups:
                kept[-1] = dataclasses.replace(kept[-1], request_finished=True)
            self._uncomputed[request_id] = kept
        return found

    def _end_with_error(self, request_id: str, info: ErrorInfo) -> None:
        self.abort(request_id)
        self._uncomputed[request_id] = [
            TokenOutput(
                request_id, finish_reason=FinishReason.ERROR, error=info, request_finished=True
            )
        ]

    def _take_uncomputed(self) -> list[TokenOutput]:
        outputs = [output for reported in self._uncomputed.values() for output in reported]
        self._uncomputed.clear()
        return outputs
