"""From a step's plan to the arrays that the model and the sampler take.

What a sequence keeps from step to step (block table, sampling parameters) stays in a row of host
arrays; a step gathers rows, and touches no token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.worker.engine.plan import StepPlan
from inferq.worker.engine.sampler import SamplingBatch
from inferq.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tokens [T] and sampled rows [R] on the device."""

    token_ids: Tensor
    positions: Tensor
    batch: AttentionBatch
    rows: Tensor
    """Indexes into T of the last tokens of the sequences that sample."""
    sampled: list[Sequence]
    """Those sequences, in the order of rows."""
    sampling: SamplingBatch


class SequenceRows:
    """Host rows of the sequences in the latest plan; those that left it lose their row."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.child = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        #: Tokens before which a sequence may not end.
        self.min_length = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_size = block_size
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
        # Blocks before the first one that this step writes are full: they do not change.
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
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed or 0
        self.child[row] = sequence.child_index
        self.min_length[row] = sequence.num_prompt_tokens + params.min_tokens
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs


class StepInputBuilder:
    """Builds each step's inputs, with token ids in a host buffer that is made once."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._rows = SequenceRows(max_num_seqs, -(-max_model_len // block_size), block_size)
        # Pinned memory lets the copy to a GPU run beside the host.
        self._token_ids = torch.zeros(
            max_num_tokens, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._host_token_ids = self._token_ids.numpy()
        self._counting = np.arange(max_num_tokens, dtype=np.int64)

    def build(self, plan: StepPlan) -> StepInputs:
        """Return the plan's inputs, valid until the next call."""
        scheduled, total, size = plan.scheduled, plan.num_tokens, len(plan.scheduled)
        sequences = [item.sequence for item in scheduled]
        rows = self._rows.assign(sequences)
        query_lens = np.fromiter((item.num_tokens for item in scheduled), np.int64, size)
        contexts = np.fromiter((s.num_computed_tokens for s in sequences), np.int64, size)
        known = np.fromiter((len(s.token_ids) for s in sequences), np.int64, size)
        ends = query_lens.cumsum()
        starts = ends - query_lens
        self._fill_token_ids(plan, starts)
        owners = self._counting[:size].repeat(query_lens)
        positions = self._counting[:total] + (contexts - starts)[owners]
        seq_lens = contexts + query_lens
        tables = self._rows.block_tables[rows, : -(-int(seq_lens.max()) // self._block_size)]
        blocks = tables[owners, positions // self._block_size].astype(np.int64)
        sampled = np.flatnonzero(seq_lens == known)
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
            positions=self._copy(positions),
            batch=batch,
            rows=self._copy(ends[sampled] - 1),
            sampled=[sequences[index] for index in sampled.tolist()],
            sampling=self._sampling(sequences, sampled, rows[sampled], known[sampled]),
        )

    def _fill_token_ids(self, plan: StepPlan, starts: NDArray[np.int64]) -> None:
        decodes = plan.scheduled[: plan.num_decodes]
        self._host_token_ids[: len(decodes)] = [
            item.sequence.token_ids[item.sequence.num_computed_tokens] for item in decodes
        ]
        for item, start in zip(
            plan.scheduled[plan.num_decodes :], starts[plan.num_decodes :].tolist(), strict=True
        ):
            first = item.sequence.num_computed_tokens
            self._host_token_ids[start : start + item.num_tokens] = item.sequence.token_ids[
                first : first + item.num_tokens
            ]

    def _sampling(
        self,
        sequences: list[Sequence],
        sampled: NDArray[np.int64],
        rows: NDArray[np.int64],
        known: NDArray[np.int64],
    ) -> SamplingBatch:
        held = self._rows
        pairs = [
            (index, token)
            for index in np.flatnonzero(known < held.min_length[rows]).tolist()
            for token in self._end_tokens(sequences[sampled[index]])
        ]
        banned = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return SamplingBatch(
            temperature=held.temperature[rows],
            top_k=held.top_k[rows],
            top_p=held.top_p[rows],
            min_p=held.min_p[rows],
            seed=held.seed[rows],
            child=held.child[rows],
            position=known,
            num_logprobs=held.num_logprobs[rows],
            banned_rows=banned[:, 0].copy(),
            banned_tokens=banned[:, 1].copy(),
        )

    def _end_tokens(self, sequence: Sequence) -> list[int]:
        """Return the tokens that would end the sequence, and may not do so yet."""
        params = sequence.params
        ends = set(params.stop_token_ids)
        return sorted(ends if params.ignore_eos else ends | self._eos_token_ids)

    def _copy(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
