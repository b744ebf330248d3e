"""Checks of the parameters that name tokens or texts, against a model's vocabulary."""

from __future__ import annotations

from collections.abc import Collection

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams


def check_token_parameters(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidRequestError`, naming field and id, for a token that does not exist."""
    check_in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    check_in_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    if params.logit_bias:
        check_in_vocabulary("logit_bias", [token for token, _ in params.biases], vocab_size)


def check_in_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise `InvalidRequestError` if an id of `field` is not in [0, vocab_size)."""
    # min and max run in C: prompts are long
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        outside = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidRequestError(
            f"{outside} is not in the vocabulary of {vocab_size} tokens",
            field=field,
            limit=f"[0, {vocab_size - 1}]",
        )
