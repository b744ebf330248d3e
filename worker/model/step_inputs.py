"""From a step's plan to the arrays that the model and the sampler take.

What a sequence keeps from step to step (block table, sampling parameters) stays in a row of host
arrays; a step gathers rows, and touches no token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.worker.engine.plan import UNKNOWN_TOKEN, StepPlan
from inferq.worker.engine.sampler import SamplingBatch
from inferq.worker.engine.sequence import Sequence
from inferq.worker.model.asked import Asked, StepAsks, num_alternatives, step_asks


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Tokens that the step before sampled, and only the device knows."""

    rows: Tensor
    """int64 [N]: indexes into T."""
    sources: Tensor
    """int64 [N]: indexes into the tokens that the step before sampled."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens [T] on the device, and what is sampled from which of their rows [R]."""

    token_ids: Tensor
    unknown: UnknownTokens | None
    """Those of `token_ids` that are still to be put in."""
    positions: Tensor
    batch: AttentionBatch
    rows: Tensor
    """Indexes into T: the last tokens of the sequences that sample, then the asked prompt rows."""
    sampled: list[Sequence]
    """Those sequences, in the order of rows."""
    sampling: SamplingBatch
    too_early: list[tuple[int, Sequence]]
    """Rows of the sequences that may not end yet."""
    asks: StepAsks | None


class SequenceRows:
    """Host rows of the sequences in the latest plan; those that left it lose their row."""

    def __init__(
        self, max_num_seqs: int, max_blocks: int, block_size: int, vocab_size: int
    ) -> None:
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.child = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_ranked = np.zeros(max_num_seqs, dtype=np.bool_)
        self.asked = np.zeros(max_num_seqs, dtype=np.uint8)
        #: Tokens before which a sequence may not end.
        self.min_length = np.zeros(max_num_seqs, dtype=np.int64)
        #: Index of a sequence's token among those that the latest step sampled.
        self.sample_index = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._rows: dict[Sequence, int] = {}
        # The list that a row was copied from: a preempted sequence comes back with another one.
        self._copied: dict[Sequence, list[int]] = {}

    def assign(self, sequences: SequenceOf[Sequence]) -> NDArray[np.int64]:
        """Return each sequence's row, with its block table and parameters up to date."""
        if gone := self._rows.keys() - set(sequences):
            for sequence in gone:
                self._free.append(self._rows.pop(sequence))
                del self._copied[sequence]
        for sequence in sequences:
            self._update(sequence)
        return np.fromiter(map(self._rows.__getitem__, sequences), np.int64, len(sequences))

    def _update(self, sequence: Sequence) -> None:
        table = sequence.block_table
        row = self._rows.get(sequence)
        # Blocks before the first one that this step writes are full: they do not change. Copying
        # on write replaces that first one, or none.
        first = sequence.num_computed_tokens // self._block_size
        if row is None:
            row = self._rows[sequence] = self._free.pop()
            self._set_params(row, sequence)
        if self._copied.get(sequence) is not table:
            self._copied[sequence] = table
            first = 0
        self.block_tables[row, first : len(table)] = table[first:]

    def _set_params(self, row: int, sequence: Sequence) -> None:
        params = sequence.params
        # Beams are ranked, not drawn: what their search needs are the best candidates.
        is_beam = params.beam_width is not None
        logprobs = None if is_beam else params.logprobs
        self.temperature[row] = 0.0 if is_beam or params.is_greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed or 0
        self.child[row] = sequence.child_index
        self.min_length[row] = sequence.num_prompt_tokens + params.min_tokens
        self.num_logprobs[row] = num_alternatives(logprobs, self._vocab_size)
        self.is_ranked[row] = not is_beam and params.num_candidates > params.n
        self.asked[row] = Asked.by(params)


class StepInputBuilder:
    """Builds each step's inputs, with token ids in host buffers that are made once."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        self._rows = SequenceRows(max_num_seqs, max_blocks, block_size, vocab_size)
        # Two, in turn: the step before may still be running. Pinned memory lets the copy to a GPU
        # run beside the host.
        self._token_ids, self._other_token_ids = (
            torch.zeros(max_num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda")
            for _ in range(2)
        )
        self._counting = np.arange(max_num_tokens, dtype=np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """Return the plan's inputs, valid until the call after the next."""
        scheduled, total, size = plan.scheduled, plan.num_tokens, len(plan.scheduled)
        sequences = [item.sequence for item in scheduled]
        rows = self._rows.assign(sequences)
        query_lens = np.fromiter((item.num_tokens for item in scheduled), np.int64, size)
        contexts = np.fromiter((s.num_computed_tokens for s in sequences), np.int64, size)
        known = np.fromiter((len(s.token_ids) for s in sequences), np.int64, size)
        ends = query_lens.cumsum()
        starts = ends - query_lens
        host_token_ids = self._fill_token_ids(plan, starts)
        owners = self._counting[:size].repeat(query_lens)
        positions = self._counting[:total] + (contexts - starts)[owners]
        seq_lens = contexts + query_lens
        tables = self._rows.block_tables[rows, : -(-int(seq_lens.max()) // self._block_size)]
        blocks = tables[owners, positions // self._block_size].astype(np.int64)
        sampled = np.flatnonzero(seq_lens == known)
        asks = step_asks(plan, self._rows.asked[rows], sampled, starts, self._vocab_size)
        computed = ends[sampled] - 1
        if asks is not None and asks.prompt is not None:
            computed = np.concatenate((computed, asks.prompt.rows))
        unknown = self._unknown_tokens(host_token_ids[:total], rows[owners])
        sampled_rows, sampled_known = rows[sampled], known[sampled]
        self._rows.sample_index[sampled_rows] = self._counting[: sampled.size]
        too_early = np.flatnonzero(sampled_known < self._rows.min_length[sampled_rows]).tolist()
        batch = AttentionBatch(
            query_starts=self._copy(np.append(starts, total).astype(np.int32)),
            seq_lens=self._copy(seq_lens.astype(np.int32)),
            block_tables=self._copy(tables),
            slot_mapping=self._copy(blocks * self._block_size + positions % self._block_size),
            num_decodes=plan.num_decodes,
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple(contexts.tolist()),
            block_size=self._block_size,
        )
        return StepInputs(
            token_ids=self._token_ids[:total].to(self._device, non_blocking=True),
            unknown=unknown,
            positions=self._copy(positions),
            batch=batch,
            rows=self._copy(computed),
            sampled=[sequences[index] for index in sampled.tolist()],
            sampling=self._sampling(sampled_rows, sampled_known, asks),
            too_early=[(row, sequences[sampled[row]]) for row in too_early],
            asks=asks,
        )

    def forget(self) -> None:
        """Let go of all sequences: a step has none."""
        self._rows.assign(())

    def _fill_token_ids(self, plan: StepPlan, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        self._token_ids, self._other_token_ids = self._other_token_ids, self._token_ids
        host: NDArray[np.int64] = self._token_ids.numpy()
        decodes = plan.scheduled[: plan.num_decodes]
        host[: len(decodes)] = [
            item.sequence.token_ids[item.sequence.num_computed_tokens] for item in decodes
        ]
        for item, start in zip(
            plan.scheduled[plan.num_decodes :], starts[plan.num_decodes :].tolist(), strict=True
        ):
            first = item.sequence.num_computed_tokens
            tokens = item.sequence.token_ids[first : first + item.num_tokens]
            host[start : start + item.num_tokens] = tokens
        return host

    def _unknown_tokens(
        self, token_ids: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> UnknownTokens | None:
        unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
        if not unknown.size:
            return None
        return UnknownTokens(
            self._copy(unknown), self._copy(self._rows.sample_index[rows[unknown]])
        )

    def _sampling(
        self, rows: NDArray[np.int64], known: NDArray[np.int64], asks: StepAsks | None
    ) -> SamplingBatch:
        held = self._rows
        batch = SamplingBatch(
            temperature=held.temperature[rows],
            top_k=held.top_k[rows],
            top_p=held.top_p[rows],
            min_p=held.min_p[rows],
            seed=held.seed[rows],
            child=held.child[rows],
            position=known,
            num_logprobs=held.num_logprobs[rows],
            is_ranked=held.is_ranked[rows],
        )
        if asks is None:
            return batch
        if asks.beams:
            batch = replace(batch, beams=tuple(asks.beams))
        if asks.children is not None:
            batch = batch.with_children(asks.children)
        return batch

    def _copy(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
