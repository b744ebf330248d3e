"""Jobs that ask for the tokens of a prompt alone: no engine is needed for them."""

from __future__ import annotations

from datetime import datetime

from inferq.protocol.messages import FinishReason
from inferq.protocol.output_log import JobLog
from inferq.protocol.prompts import Prompt
from inferq.worker.engine.requests.request import encode_prompt
from inferq.worker.engine.requests.token_parameters import check_in_vocabulary
from inferq.worker.engine.text.tokenizer import Tokenizer


def tokenized_log(
    prompt: Prompt, tokenizer: Tokenizer, *, vocab_size: int, now: datetime | None = None
) -> JobLog:
    """Return a log whose only output is the prompt, with all of its text, special tokens too.

    `now` is the time that a chat template may mention. Raises `InvalidRequestError`.
    """
    field, token_ids = encode_prompt(prompt, tokenizer, now=now)
    check_in_vocabulary(field, token_ids, vocab_size)
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    log = JobLog()
    log.token_bytes = tokenizer.token_bytes
    for token_id in token_ids:
        log.append(token_id, detokenizer.append(token_id), None)
    [output] = log.outputs
    output.tail = detokenizer.finish()
    output.finish_reason = FinishReason.STOP
    return log
