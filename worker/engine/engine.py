"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import TypeVar

from inferq.protocol.errors import ErrorInfo, InvalidRequestError
from inferq.protocol.messages import FinishReason
from inferq.protocol.snapshots import BlockSnapshot
from inferq.worker.engine.blocks.block_map import map_blocks
from inferq.worker.engine.blocks.block_pool import BlockPool
from inferq.worker.engine.blocks.host_pool import HostPool
from inferq.worker.engine.collector import Collector
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.flight import (
    Flight,
    Landed,
    assume_computed,
    decides_on_host,
    forget_samples,
)
from inferq.worker.engine.requests.ends import end_of
from inferq.worker.engine.requests.group import SequenceGroup
from inferq.worker.engine.requests.request_checks import check_request
from inferq.worker.engine.requests.request_events import RequestEvent
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence
from inferq.worker.engine.requests.token_output import TokenOutput
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.scheduling.plan import (
    ModelRunner,
    RunnerSpeeds,
    SequenceResult,
    StepHandle,
    StepPlan,
)
from inferq.worker.engine.scheduling.preemption import PreemptionHook
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit
from inferq.worker.engine.scheduling.scheduler import Scheduler
from inferq.worker.engine.stats import EngineStats

__all__ = ["Engine", "TokenOutput"]

_T = TypeVar("_T")


class Engine:
    """Continuous batching over one model runner; for one thread.

    An output ends with an end token (which is part of it), at `max_tokens`, or with reason `length`
    when it reaches `max_model_len` or fills the whole KV cache. A request has `n` or `best_of`
    outputs, each of which is reported as it grows, or the best `n` beams, reported when the search
    has ended. `on_step` sees each plan before it is computed, with its blocks allocated; it must
    not change anything. `preemption_hook` may disturb the schedule, never the tokens.

    Without `enable_prefix_caching` each request gets a private salt: its sequences still find the
    blocks that they share when they are computed again, and nobody else's.

    With `launches_ahead` a step is planned and launched while the one before it is computed: the
    tokens that this one samples are unknown then, and go from step to step on the device. A
    sequence that ends with it has been launched in vain: what that brings is dropped. Its blocks
    are free at once, since whoever gets them writes to them in a later step. A step whose results
    decide what the next one computes (see `flight.decides_on_host`) is collected before that is
    planned. The tokens are the same either way.
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
        launches_ahead: bool = False,
        prompt_limit: PromptLimit | None = None,
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
            prompt_limit=prompt_limit,
        )
        self._collector = Collector(
            self._scheduler.residency, eos_token_ids=eos_token_ids, max_length=self._max_length
        )
        self._on_step = on_step
        self._prompt_limit = prompt_limit
        self._groups: dict[str, SequenceGroup] = {}
        #: Outputs by request, until the next step reports them.
        self._unreported: dict[str, list[TokenOutput]] = {}
        self._launches_ahead = launches_ahead
        #: The step that was launched and not collected.
        self._flight: Flight | None = None
        #: When the last step's results were there, on the clock of `Flight.began`.
        self._last_ended = 0.0
        self._private_salts = count()
        self._num_steps = 0
        self._computed_tokens = 0
        self._computed_sequences = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raise `InvalidRequestError` for one that can never be served.

        Outputs that are already complete with their resumed tokens are reported by the next step,
        uncomputed.
        """
        if request.request_id in self._groups or request.request_id in self._unreported:
            raise InvalidRequestError(
                f"{request.request_id!r} is in use", field="request_id", limit="unique"
            )
        self._check_adapter(request.adapter)
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
            self._unreported[group.request_id] = complete
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
        reported = self._unreported.pop(request_id, None)
        group = self._groups.pop(request_id, None)
        if group is not None:
            self._collector.drop(group)
        return group is not None or reported is not None

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._groups or self._unreported)

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return what is new; nothing to do returns nothing.

        A request that the runner names as failed ends with its error; the others' step is repeated.
        Any other exception of the runner's is passed on. The step then counts as not run, its
        blocks stay with their sequences, except that sequences whose blocks were to be moved are
        computed again, and the books balance; whether the device can still be trusted, only the
        caller knows. If another step was launched after the one that failed, neither counts, and
        all is computed again.

        With `launches_ahead` what is new is what the step before brought.
        """
        reports: list[TokenOutput] = []
        try:
            self._step(reports)
        except BaseException:
            for output in [*reports, *self._take_unreported()]:
                self._unreported.setdefault(output.request_id, []).append(output)
            raise
        return reports + self._take_unreported()

    def take_events(self) -> SequenceOf[RequestEvent]:
        """Return what happened to traced requests since the last call."""
        return self._scheduler.events.take()

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
            computed_tokens=self._computed_tokens,
            computed_sequences=self._computed_sequences,
        )

    def block_map(self) -> BlockSnapshot:
        """Return what each KV block is and who holds it; O(blocks), between steps."""
        return map_blocks(
            self._scheduler.residency, shows_cached=self._config.enable_prefix_caching
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless every block is accounted for; O(blocks), between steps."""
        self._scheduler.residency.check_integrity()

    def _check_adapter(self, name: str) -> None:
        known = self._config.lora_adapters or {}
        if name and name not in known:
            raise InvalidRequestError(
                f"{name!r} is not loaded; {', '.join(known) or 'no adapter'} is", field="adapter"
            )

    def _step(self, reports: list[TokenOutput]) -> None:
        plan, rejected = self._scheduler.schedule()
        for group, info in rejected:
            self._end_with_error(group.request_id, info)
        reports += self._take_unreported()
        try:
            launched = self._launch(plan)
        except BaseException:
            if self._flight is not None:
                self._land(reports)
            raise
        if self._flight is not None and not self._land(reports):
            return
        if launched is None:
            return
        if self._launches_ahead and not decides_on_host(plan):
            assume_computed(plan, self._scheduler, self._max_length)
            self._flight = launched
            return
        results = self._run(lambda: self._collect(launched))
        if results is not None:
            self._scheduler.confirm_moves()
            self._update(plan, results, reports, is_advanced=False)

    def _launch(self, plan: StepPlan) -> Flight | None:
        """Begin a step; None if there is nothing to do, or requests have failed."""
        if not (plan.scheduled or plan.swap_out):
            return None
        if self._on_step is not None:
            self._on_step(plan)
        began = time.perf_counter()
        handle: StepHandle | None
        if self._launches_ahead:
            handle = self._run(lambda: self._runner.launch(plan))
        else:
            results = self._run(lambda: self._runner.execute(plan))
            handle = None if results is None else Landed(results)
        if handle is None:
            return None
        self._num_steps += 1
        self._computed_tokens += plan.num_tokens
        self._computed_sequences += len(plan.scheduled)
        return Flight(plan, handle, began)

    def _collect(self, flight: Flight) -> SequenceOf[SequenceResult]:
        """Wait for a step's results, and let the limit of prompts learn from its time.

        A step that was launched while another one ran began when that one had ended.
        """
        results = flight.handle.results()
        ended = time.perf_counter()
        if self._prompt_limit is not None:
            self._prompt_limit.learn(
                num_decodes=flight.plan.num_decodes,
                num_tokens=flight.plan.num_tokens,
                seconds=ended - max(flight.began, self._last_ended),
            )
        self._last_ended = ended
        return results

    def _run(self, work: Callable[[], _T]) -> _T | None:
        """Let the runner work on the last plan; None if that ended requests and must be repeated.

        Whatever else it raises is passed on, with the books in order.
        """
        try:
            return work()
        except FailedRequestsError as error:
            self._scheduler.confirm_moves()
            self._end_failed(error)
            return None
        except BaseException:
            self._scheduler.abandon_moves()
            raise

    def _land(self, reports: list[TokenOutput]) -> bool:
        """Collect the step in flight; False if it failed, and what was launched after it as well.

        Then nobody knows what is in the blocks that the two wrote or read.
        """
        flight, self._flight = self._flight, None
        assert flight is not None, "a step is in flight"
        try:
            results = self._collect(flight)
        except BaseException as error:
            forget_samples(flight.plan)
            self._scheduler.restart()
            if not isinstance(error, FailedRequestsError):
                raise
            self._end_failed(error)
            return False
        self._update(flight.plan, results, reports, is_advanced=True)
        return True

    def _update(
        self,
        plan: StepPlan,
        results: SequenceOf[SequenceResult],
        reports: list[TokenOutput],
        *,
        is_advanced: bool,
    ) -> None:
        for item, result in zip(plan.scheduled, results, strict=True):
            if result.error is not None:
                if not item.sequence.is_finished:
                    self._end_with_error(item.sequence.request_id, result.error)
            elif item.samples != bool(result.samples or result.candidates):
                raise RuntimeError(f"{item}: the runner gave {result}")
            if result.prompt_logprobs:
                item.sequence.group.collect_prompt_logprobs(item.first, result.prompt_logprobs)
        if not is_advanced:
            for item in plan.scheduled:
                if not item.sequence.is_finished:
                    self._scheduler.advance(item)
        for output in self._collector.collect(plan, results):
            reports.append(output)
            if output.request_finished:
                del self._groups[output.request_id]

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
        reported = self._unreported.pop(request_id, [])
        kept = [output for output in reported if output.index != index or output.error]
        found = len(kept) < len(reported)
        if group is not None:
            found = self._collector.drop_output(group, index) or found
            if not group.sequences:
                del self._groups[request_id]
        if kept:
            if request_id not in self._groups:
                kept[-1] = dataclasses.replace(kept[-1], request_finished=True)
            self._unreported[request_id] = kept
        return found

    def _end_failed(self, error: FailedRequestsError) -> None:
        for request_id, info in error.failed.items():
            self._end_with_error(request_id, info)

    def _end_with_error(self, request_id: str, info: ErrorInfo) -> None:
        self.abort(request_id)
        self._unreported[request_id] = [
            TokenOutput(
                request_id, finish_reason=FinishReason.ERROR, error=info, request_finished=True
            )
        ]

    def _take_unreported(self) -> list[TokenOutput]:
        outputs = [output for reported in self._unreported.values() for output in reported]
        self._unreported.clear()
        return outputs
