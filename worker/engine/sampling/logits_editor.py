"""From what requests ask to the edits of one step's logits; nothing for those that ask nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inferq.protocol.errors import ErrorCode, ErrorInfo, InferqError, MissingExtraError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.runner_errors import FailedRequestsError
from inferq.worker.engine.sampling.bad_words import BadWords, word_tokens
from inferq.worker.engine.sampling.edit_asks import asks_penalties
from inferq.worker.engine.sampling.logits_edits import (
    AllowedTokens,
    LogitsEdits,
    Penalties,
    TokenPairs,
)
from inferq.worker.engine.sampling.token_counts import TokenCounts
from inferq.worker.model.architecture.vocabulary import ModelVocabulary

if TYPE_CHECKING:
    from inferq.worker.engine.sampling.form_masks import FormMasks, FormMatchers
    from inferq.worker.engine.sampling.structured_output import FormCompiler


class _SequenceEdits:
    """What one sequence asks, in the forms that a step takes."""

    __slots__ = ("allowed", "bad_words", "bias_tokens", "bias_values", "counts", "params")

    def __init__(self, sequence: Sequence, vocabulary: ModelVocabulary, vocab_size: int) -> None:
        params = self.params = sequence.params
        self.allowed: NDArray[np.uint8] | None = None
        if params.allowed_token_ids:
            is_allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
            is_allowed[list(params.allowed_token_ids)] = True
            self.allowed = np.packbits(is_allowed, bitorder="little")
        self.bad_words = None
        if params.bad_words:
            words = word_tokens(params.bad_words, vocabulary.tokenize)
            self.bad_words = BadWords(words, vocab_size)
        self.bias_tokens = np.array([token for token, _ in params.biases], dtype=np.int64)
        self.bias_values = np.array([value for _, value in params.biases], dtype=np.float32)
        self.counts: TokenCounts | None = None

    def counted(self, sequence: Sequence) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if self.counts is None or not self.counts.is_of(sequence):
            is_repetition = self.params.repetition_penalty != 1.0
            self.counts = TokenCounts(sequence, counts_prompt=is_repetition)
        return self.counts.update()


@dataclass(slots=True)
class PendingEdits:
    """One step's edits whose masks are still being computed; see `LogitsEditor.start`."""

    editor: LogitsEditor
    asking: list[tuple[int, Sequence]]
    banned: list[tuple[int, int]]
    #: Indexes into `asking` of the sequences with a form, in the order of their masks.
    with_form: list[int]
    masks: Future[FormMasks] | None

    def finish(self) -> LogitsEdits:
        """Return the edits; raises `FailedRequestsError` for requests that cannot go on."""
        return self.editor.finish(self)


class LogitsEditor:
    """Keeps what each sequence asks for from step to step; for one thread.

    Sequences are kept until they are finished: a preempted one finds its state again.
    """

    def __init__(
        self, vocabulary: ModelVocabulary, vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._kept: dict[Sequence, _SequenceEdits] = {}
        self._compiler: FormCompiler | None = None
        self._matchers: FormMatchers | None = None

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """Begin to compile the forms of sequences that will sample in a later step."""
        for sequence in sequences:
            if (form := sequence.params.structured_outputs) is not None:
                self._make_matchers()
                assert self._compiler is not None
                self._compiler.expect(form)

    def start(
        self, asking: SequenceOf[tuple[int, Sequence]], too_early: SequenceOf[tuple[int, Sequence]]
    ) -> PendingEdits:
        """Begin a step's edits, given the rows of sequences that ask for some.

        Those `too_early` may not end yet.
        """
        for sequence in [s for s in self._kept if s.is_finished]:
            del self._kept[sequence]
        banned = [
            (row, token) for row, sequence in too_early for token in self._end_tokens(sequence)
        ]
        with_form = [i for i, (_, s) in enumerate(asking) if s.params.structured_outputs]
        masks = None
        if with_form:
            masks = self._make_matchers().start([asking[index][1] for index in with_form])
        return PendingEdits(self, list(asking), banned, with_form, masks)

    def finish(self, pending: PendingEdits) -> LogitsEdits:
        """See `PendingEdits.finish`."""
        failed: dict[str, ErrorInfo] = {}
        columns = _Columns(banned=pending.banned)
        for row, sequence in pending.asking:
            try:
                self._collect(columns, row, sequence)
            except InferqError as error:
                failed[sequence.request_id] = ErrorInfo(ErrorCode.INTERNAL, str(error))
        if pending.masks is not None:
            masks = pending.masks.result()
            for place, index in enumerate(pending.with_form):
                row, sequence = pending.asking[index]
                if (info := masks.failed.get(place)) is not None:
                    failed[sequence.request_id] = info
                columns.allow(row, masks.bits[place])
        if failed:
            raise FailedRequestsError(failed)
        return columns.edits()

    def _collect(self, columns: _Columns, row: int, sequence: Sequence) -> None:
        kept = self._kept.get(sequence)
        if kept is None:
            kept = _SequenceEdits(sequence, self._vocabulary, self._vocab_size)
            self._kept[sequence] = kept
        if kept.allowed is not None:
            columns.allow(row, kept.allowed)
        if kept.bad_words is not None:
            columns.ban(row, kept.bad_words.single)
            longer = kept.bad_words.banned_after(sequence.token_ids, sequence.num_prompt_tokens)
            columns.ban(row, longer)
        if kept.bias_tokens.size:
            columns.bias(row, kept.bias_tokens, kept.bias_values)
        if asks_penalties(sequence.params):
            columns.penalize(row, sequence.params, *kept.counted(sequence))

    def _end_tokens(self, sequence: Sequence) -> list[int]:
        """Return the tokens that would end the sequence, and may not do so yet."""
        params = sequence.params
        ends = set(params.stop_token_ids)
        return sorted(ends if params.ignore_eos else ends | self._end_token_ids)

    def _make_matchers(self) -> FormMatchers:
        if self._matchers is None:
            try:
                # Imported for the first request with a form: others do not need llguidance.
                from inferq.worker.engine.sampling.form_masks import FormMatchers
                from inferq.worker.engine.sampling.structured_output import FormCompiler
            except ModuleNotFoundError as error:
                raise MissingExtraError("worker", error.name or "llguidance") from None
            self._compiler = FormCompiler(self._vocabulary.tokenizer_json, self._end_token_ids)
            self._matchers = FormMatchers(self._compiler, self._vocab_size)
        return self._matchers


@dataclass(slots=True)
class _Columns:
    """The edits of one step while they are collected row by row."""

    banned: list[tuple[int, int]]
    allowed: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    bias_rows: list[int] = field(default_factory=list)
    bias_tokens: list[NDArray[np.int64]] = field(default_factory=list)
    bias_values: list[NDArray[np.float32]] = field(default_factory=list)
    penalized: list[tuple[int, float, float, float]] = field(default_factory=list)
    tokens: list[NDArray[np.int64]] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)

    def allow(self, row: int, bits: NDArray[np.uint8]) -> None:
        known = self.allowed.get(row)
        self.allowed[row] = bits if known is None else bits & known

    def ban(self, row: int, tokens: Iterable[int]) -> None:
        self.banned += [(row, token) for token in tokens]

    def bias(self, row: int, tokens: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self.bias_rows.append(row)
        self.bias_tokens.append(tokens)
        self.bias_values.append(values)

    def penalize(
        self,
        row: int,
        params: SamplingParams,
        tokens: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> None:
        if tokens.size:
            self.penalized.append(
                (
                    row,
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                )
            )
            self.tokens.append(tokens)
            self.counts.append(counts)

    def edits(self) -> LogitsEdits:
        banned = np.array(self.banned, dtype=np.int64).reshape(-1, 2)
        allowed = None
        if self.allowed:
            rows = np.fromiter(self.allowed, np.int64, len(self.allowed))
            allowed = AllowedTokens(rows, np.stack(list(self.allowed.values())))
        biases = None
        if self.bias_rows:
            rows = np.array(self.bias_rows).repeat([len(tokens) for tokens in self.bias_tokens])
            values = np.concatenate(self.bias_values)
            biases = TokenPairs(rows, np.concatenate(self.bias_tokens), values)
        return LogitsEdits(
            allowed, banned[:, 0].copy(), banned[:, 1].copy(), biases, self._penalties()
        )

    def _penalties(self) -> Penalties | None:
        if not self.penalized:
            return None
        columns: Any = np.array(self.penalized, dtype=np.float64).T
        return Penalties(
            rows=columns[0].astype(np.int64),
            repetition=columns[1].astype(np.float32),
            presence=columns[2].astype(np.float32),
            frequency=columns[3].astype(np.float32),
            owners=np.arange(len(self.tokens)).repeat([len(tokens) for tokens in self.tokens]),
            tokens=np.concatenate(self.tokens),
            counts=np.concatenate(self.counts),
        )
