"""From a step's plan to the arrays that the model and the sampler take.

What a sequence keeps from step to step (block table, sampling parameters) stays in a row of host
arrays; a step gathers rows, and touches no token in Python.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.sampling.packed_copy import PackedCopy
from inferq.worker.engine.sampling.sampler import SamplingBatch
from inferq.worker.engine.scheduling.plan import UNKNOWN_TOKEN, StepPlan
from inferq.worker.model.architecture.causal_model import StepTensors
from inferq.worker.model.running.asked import Asked, StepAsks, num_alternatives, step_asks
from inferq.worker.model.running.device_rows import NUM_COLUMNS, RowUpdates, padding_columns


@dataclass(frozen=True, slots=True)
class UnknownTokens:
    """Tokens that the step before sampled, and only the device knows."""

    rows: Tensor
    """int64 [N]: indexes into T."""
    sources: Tensor
    """int64 [N]: indexes into the tokens that the step before sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """What is sampled from which rows of a step's logits."""

    sampled: list[Sequence]
    """The sequences that sample, in the order of rows."""
    sampling: SamplingBatch
    too_early: list[tuple[int, Sequence]]
    """Rows of the sequences that may not end yet."""
    asks: StepAsks | None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but a token is asked of any row."""
        batch = self.sampling
        if self.asks is not None or self.too_early:
            return False
        return not bool((batch.num_logprobs >= 0).any() or batch.is_ranked.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs(StepSamples):
    """A step in which every sequence computes its last token, for a captured graph of some size."""

    columns: NDArray[np.int64]
    """[5, size]: rows in `DeviceRows`, tokens computed before, tokens (below 0: see the next),
    indexes into what the step before sampled, and blocks to write to; then padding."""
    updates: RowUpdates | None
    has_adapters: bool
    """Whether some sequence has an adapter: its number is in the sequence's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs(StepSamples):
    """One step's tokens [T] on the device."""

    tensors: StepTensors
    """Its rows: the last tokens of the sequences that sample, then the asked prompt rows."""
    unknown: UnknownTokens | None
    """Those of its tokens that are still to be put in."""


class SequenceRows:
    """Host rows of the sequences in the latest plan; those that left it lose their row."""

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        vocab_size: int,
        adapters: SequenceOf[str],
    ) -> None:
        self.block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.child = np.zeros(max_num_seqs, dtype=np.int64)
        self.adapter = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_ranked = np.zeros(max_num_seqs, dtype=np.bool_)
        self.asked = np.zeros(max_num_seqs, dtype=np.uint8)
        #: Tokens before which a sequence may not end.
        self.min_length = np.zeros(max_num_seqs, dtype=np.int64)
        #: Index of a sequence's token among those that the latest step sampled.
        self.sample_index = np.zeros(max_num_seqs, dtype=np.int64)
        #: How many leading blocks of a row's table `DeviceRows` has; -1: nothing of the row.
        self.device_blocks = np.full(max_num_seqs, -1, dtype=np.int64)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._adapters = {name: number for number, name in enumerate(("", *adapters))}
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
        rows = np.fromiter(map(self._rows.__getitem__, sequences), np.int64, len(sequences))
        # The first of several outputs may be aborted while the prompt is computed.
        for index in np.flatnonzero(self.asked[rows] & Asked.OUTPUTS).tolist():
            self.child[rows[index]] = sequences[index].child_index
        return rows

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
            self.device_blocks[row] = min(self.device_blocks[row], 0)
            first = 0
        self.block_tables[row, first : len(table)] = table[first:]

    def device_updates(
        self, rows: NDArray[np.int64], last_blocks: NDArray[np.int64]
    ) -> RowUpdates | None:
        """Return what `DeviceRows` lacks for a decode step, which itself writes the last blocks.

        `last_blocks` are their indexes in the tables of `rows`.
        """
        is_stale = self.device_blocks[rows] < last_blocks
        self.device_blocks[rows] = last_blocks + 1
        if not is_stale.any():
            return None
        stale = rows[is_stale]
        return RowUpdates(
            rows=stale,
            block_tables=self.block_tables[stale, : int(last_blocks[is_stale].max()) + 1],
            floats=np.stack((self.temperature[stale], self.top_p[stale], self.min_p[stale])),
            integers=np.stack(
                (self.top_k[stale], self.seed[stale], self.child[stale], self.adapter[stale])
            ),
        )

    def _set_params(self, row: int, sequence: Sequence) -> None:
        self.device_blocks[row] = -1
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
        self.adapter[row] = self._adapters[sequence.adapter]
        self.min_length[row] = sequence.num_prompt_tokens + params.min_tokens
        self.num_logprobs[row] = num_alternatives(logprobs, self._vocab_size)
        self.is_ranked[row] = not is_beam and params.num_candidates > params.n
        self.asked[row] = Asked.by(params)


class StepInputBuilder:
    """Builds each step's inputs, sent to the device in one copy."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        adapters: SequenceOf[str] = (),
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._copy = PackedCopy(device)
        max_blocks = -(-max_model_len // block_size)
        self._rows = SequenceRows(max_num_seqs, max_blocks, block_size, vocab_size, adapters)
        self._counting = np.arange(max_num_tokens, dtype=np.int64)
        self._padding = np.array(padding_columns(max_num_seqs))[:, None]

    def build(self, plan: StepPlan) -> StepInputs:
        """Return the plan's inputs."""
        scheduled, total, size = plan.scheduled, plan.num_tokens, len(plan.scheduled)
        sequences = [item.sequence for item in scheduled]
        rows = self._rows.assign(sequences)
        query_lens = np.fromiter((item.num_tokens for item in scheduled), np.int64, size)
        contexts = np.fromiter((item.first for item in scheduled), np.int64, size)
        known = np.fromiter((len(s.token_ids) for s in sequences), np.int64, size)
        ends = query_lens.cumsum()
        starts = ends - query_lens
        token_ids = _token_ids(plan, starts)
        held = self._rows.device_blocks
        held[rows] = np.minimum(held[rows], contexts // self._block_size)
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
        unknown = np.flatnonzero(token_ids == UNKNOWN_TOKEN)
        sources = self._rows.sample_index[rows[owners[unknown]]]
        sampled_rows, sampled_known = rows[sampled], known[sampled]
        self._rows.sample_index[sampled_rows] = self._counting[: sampled.size]
        too_early = np.flatnonzero(sampled_known < self._rows.min_length[sampled_rows]).tolist()
        adapters = self._rows.adapter[rows]
        arrays = (
            np.append(starts, total).astype(np.int32),
            seq_lens.astype(np.int32),
            tables,
            blocks * self._block_size + positions % self._block_size,
            token_ids,
            positions,
            computed,
            unknown,
            sources,
            *((adapters[owners],) if adapters.any() else ()),
        )
        copies = self._copy.send(arrays)
        batch = AttentionBatch(
            query_starts=copies[0],
            seq_lens=copies[1],
            block_tables=copies[2],
            slot_mapping=copies[3],
            num_decodes=plan.num_decodes,
            query_lens=tuple(query_lens.tolist()),
            context_lens=tuple(contexts.tolist()),
            block_size=self._block_size,
        )
        return StepInputs(
            tensors=StepTensors(
                token_ids=copies[4],
                positions=copies[5],
                batch=batch,
                rows=copies[6],
                adapters=copies[9] if len(copies) > 9 else None,
            ),
            unknown=UnknownTokens(copies[7], copies[8]) if unknown.size else None,
            sampled=[sequences[index] for index in sampled.tolist()],
            sampling=self._sampling(sampled_rows, sampled_known, asks),
            too_early=[(row, sequences[sampled[row]]) for row in too_early],
            asks=asks,
        )

    def build_decodes(self, plan: StepPlan, size: int) -> DecodeInputs:
        """Return the inputs of a plan in which each sequence computes its last token, padded."""
        count, held = len(plan.scheduled), self._rows
        sequences = [item.sequence for item in plan.scheduled]
        rows = held.assign(sequences)
        contexts = np.fromiter((item.first for item in plan.scheduled), np.int64, count)
        last_blocks = contexts // self._block_size
        columns = np.empty((NUM_COLUMNS, size), dtype=np.int64)
        columns[:, count:] = self._padding
        columns[0, :count] = rows
        columns[1, :count] = contexts
        columns[2, :count] = [sequence.token_ids[-1] for sequence in sequences]
        columns[3, :count] = held.sample_index[rows]
        columns[4, :count] = held.block_tables[rows, last_blocks]
        held.sample_index[rows] = self._counting[:count]
        asks = step_asks(
            plan,
            held.asked[rows],
            self._counting[:count],
            self._counting[:count],
            self._vocab_size,
        )
        known = contexts + 1
        too_early = np.flatnonzero(known < held.min_length[rows]).tolist()
        return DecodeInputs(
            columns=columns,
            updates=held.device_updates(rows, last_blocks),
            has_adapters=bool(held.adapter[rows].any()),
            sampled=sequences,
            sampling=self._sampling(rows, known, asks),
            too_early=[(row, sequences[row]) for row in too_early],
            asks=asks,
        )

    def forget(self) -> None:
        """Let go of all sequences: a step has none."""
        self._rows.assign(())

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


def _token_ids(plan: StepPlan, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens that the plan computes; `starts` are the first of each sequence."""
    token_ids = np.empty(plan.num_tokens, dtype=np.int64)
    decodes = plan.scheduled[: plan.num_decodes]
    token_ids[: len(decodes)] = [item.sequence.token_ids[item.first] for item in decodes]
    longer = plan.scheduled[plan.num_decodes :]
    for item, start in zip(longer, starts[plan.num_decodes :].tolist(), strict=True):
        tokens = item.sequence.token_ids[item.first : item.first + item.num_tokens]
        token_ids[start : start + item.num_tokens] = tokens
    return token_ids
