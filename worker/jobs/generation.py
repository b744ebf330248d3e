"""The outputs of one request under way: tokens become text, which stop strings end; the best are
chosen at the end where there are more candidates than outputs."""

from __future__ import annotations

from collections.abc import Sequence

from inferq.protocol.messages import FinishReason, Job, TokenLogprob
from inferq.protocol.output_log import JobLog
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.request import PreparedRequest
from inferq.worker.engine.text.output import OutputText
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.pipe.engine_output import EngineOutput


def num_streams(params: SamplingParams) -> int:
    """Return how many outputs the engine reports: every candidate, but only the `n` best beams."""
    return params.n if params.beam_width is not None else params.num_candidates


def describe_tokens(
    log: JobLog, prepared: PreparedRequest, message: Job, tokenizer: Tokenizer
) -> None:
    """Have the events tell the bytes of their tokens, and the prompt's ids, where asked for."""
    params = prepared.params
    if params.prompt_logprobs is not None or message.return_prompt_token_ids:
        log.prompt_token_ids = prepared.prompt_token_ids
    if params.logprobs is not None or params.prompt_logprobs is not None:
        log.token_bytes = tokenizer.token_bytes


class Generation:
    """Fills `log` with what the engine brings; what the log holds already is replayed."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, log: JobLog) -> None:
        self.log = log
        self._params = params
        self._texts = [OutputText(tokenizer, params) for _ in log.outputs]
        for index, output in enumerate(log.outputs):
            # The text that a replay releases was published with the tokens.
            if not output.is_finished and self._texts[index].append(output.token_ids).stop:
                self._end(index, FinishReason.STOP)

    @property
    def is_finished(self) -> bool:
        """Whether all outputs have ended."""
        outputs = self.log.outputs
        if len(outputs) == 1:  # at every token of almost every job
            return outputs[0].is_finished
        return all(output.is_finished for output in outputs)

    def receive(self, new: EngineOutput) -> bool:
        """Take new tokens of one output.

        Returns whether it ended by a stop string before the engine ended it, which must be told.
        """
        output = self.log.outputs[new.index]
        if new.prompt_logprobs is not None and self.log.prompt_logprobs is None:
            self.log.prompt_logprobs = new.prompt_logprobs
        if output.is_finished:
            return False  # on its way when the engine was told
        step = self._texts[new.index].append(
            new.token_ids, ends_on_token=new.finish_reason is FinishReason.STOP
        )
        logprobs: tuple[TokenLogprob | None, ...] = new.logprobs or (None,) * len(new.token_ids)
        accepted = zip(new.token_ids, step.text_pieces, logprobs, strict=False)
        for token_id, piece, logprob in accepted:
            self.log.append(token_id, piece, logprob, new.index)
        if new.cumulative_logprobs and step.num_accepted:
            output.cumulative_logprob = new.cumulative_logprobs[step.num_accepted - 1]
        if step.stop is not None:
            self._end(new.index, FinishReason.STOP)
            return new.finish_reason is None
        if new.finish_reason is not None:
            self._end(new.index, new.finish_reason, new.stop_reason)
        return False

    def end_early(self, reason: FinishReason) -> None:
        """End the request for a reason that is not the outputs' own.

        The first output that had not ended closes the job, with the text held back from it.
        """
        self.log.close()
        for index, output in enumerate(self.log.outputs):
            if not output.is_finished:
                output.tail = self._texts[index].finish()
                output.finish_reason = reason
                self.log.closing = index
                return

    def result(self) -> JobLog:
        """Return the outputs that were asked for, best first where they were to be chosen."""
        if not self._params.publishes_at_end:
            return self.log
        indexes: Sequence[int] = range(len(self.log.outputs))
        if self._params.beam_width is None:  # beams come ranked
            indexes = sorted(indexes, key=lambda index: -self._score(index))  # ties by index
        return self.log.best(indexes[: self._params.n])

    def _score(self, index: int) -> float:
        total = self.log.outputs[index].cumulative_logprob
        if total is None:
            raise ValueError(f"the engine did not rank output {index}")
        return total

    def _end(self, index: int, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        output, text = self.log.outputs[index], self._texts[index]
        output.tail = text.finish()
        if text.stop is not None:  # it may complete in the last character released
            reason, stop_reason = FinishReason.STOP, text.stop
        output.finish_reason = reason
        output.stop_reason = stop_reason
        if self._params.logprobs is not None and self._params.beam_width is None:
            # Also where a part was generated, and summed up, by another worker.
            output.cumulative_logprob = sum(lp.logprob for lp in output.logprobs if lp is not None)
        self.log.closing = index
