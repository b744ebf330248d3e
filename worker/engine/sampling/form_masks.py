"""Masks of the tokens that keep sequences in their form, computed while the model runs."""

from __future__ import annotations

import os
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from inferq.protocol.errors import ErrorCode, ErrorInfo, InferqError, InvalidRequestError
from inferq.protocol.structured import StructuredOutputs
from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.sampling.structured_output import FormCompiler, form_error

_MAX_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class FormMasks:
    """Allowed tokens of sequences [M] as bits [M, bytes], lowest bit first.

    `failed` maps the index of a sequence that cannot go on to the reason; its bits mean nothing.
    """

    bits: NDArray[np.uint8]
    failed: dict[int, ErrorInfo]


class _Progress:
    """A matcher, and how many tokens of which list it has seen."""

    __slots__ = ("consumed", "matcher", "token_ids")

    def __init__(self, matcher: LLMatcher, sequence: Sequence) -> None:
        self.matcher = matcher
        self.token_ids = sequence.token_ids
        self.consumed = sequence.num_prompt_tokens


class FormMatchers:
    """The matchers of the sequences that have a form; for one thread."""

    def __init__(self, compiler: FormCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = -(-vocab_size // 32)
        self._progress: dict[Sequence, _Progress] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="form-masks")
        self._executor = LLExecutor(min(_MAX_THREADS, max(1, (os.cpu_count() or 1) // 2)))

    def start(self, sequences: SequenceOf[Sequence]) -> Future[FormMasks]:
        """Begin to compute each sequence's mask of next tokens, after all of its known ones.

        The sequences' tokens must not change until the result is there; then the next call may
        come.
        """
        return self._thread.submit(self._compute, tuple(sequences))

    def _compute(self, sequences: tuple[Sequence, ...]) -> FormMasks:
        for sequence in [s for s in self._progress if s.is_finished]:
            del self._progress[sequence]
        failed: dict[int, ErrorInfo] = {}
        ready: list[tuple[LLMatcher, int]] = []
        for index, sequence in enumerate(sequences):
            try:
                ready.append((self._advanced(sequence), index))
            except InferqError as error:
                failed[index] = _info(error)
        # As wide as the tokenizer, which may know more tokens than the model.
        words = np.zeros((len(sequences), self._compiler.mask_words), dtype=np.uint32)
        if ready:
            self._executor.unsafe_compute_mask_ptr(
                ready, words.ctypes.data, words.strides[0], len(sequences)
            )
        for matcher, index in ready:
            if matcher.is_error():
                form = _form(sequences[index])
                failed[index] = form_error(form, matcher.get_error()).info
        bits = np.zeros((len(sequences), 4 * self._num_words), dtype=np.uint8)
        known = words.view(np.uint8)[:, : bits.shape[1]]
        bits[:, : known.shape[1]] = known
        return FormMasks(bits, failed)

    def _advanced(self, sequence: Sequence) -> LLMatcher:
        """Return the sequence's matcher after all known tokens, replayed where it is new."""
        progress = self._progress.get(sequence)
        if progress is None or progress.token_ids is not sequence.token_ids:
            matcher = self._compiler.matcher(_form(sequence))
            progress = self._progress[sequence] = _Progress(matcher, sequence)
        matcher, tokens = progress.matcher, sequence.token_ids[progress.consumed :]
        progress.consumed = len(sequence.token_ids)
        # After its end token a sequence that ignores it may only repeat it.
        if tokens and not matcher.is_stopped():
            accepted = matcher.try_consume_tokens(tokens)
            if accepted < len(tokens) and not matcher.is_stopped():
                del self._progress[sequence]
                raise form_error(_form(sequence), "the output so far does not have this form")
        return matcher


def _form(sequence: Sequence) -> StructuredOutputs:
    form = sequence.params.structured_outputs
    assert form is not None
    return form


def _info(error: InferqError) -> ErrorInfo:
    if isinstance(error, InvalidRequestError):
        return error.info
    return ErrorInfo(ErrorCode.INTERNAL, str(error))
