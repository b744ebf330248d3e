"""The proof that packed, paged batches suit a model that we know nothing about."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from inferq.kernels.attention import AttentionBatch
from inferq.protocol.errors import ModelError
from inferq.worker.model.architecture.causal_model import CausalModel, StepTensors

_BLOCK_SIZE: Final = 16
_TEXT_LENGTH: Final = 6
#: Rows that agree are this near, in the norm; rounding of 16 bits through many layers is below.
_TOLERANCE: Final = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@torch.inference_mode()
def check_tokens_meet_in_attention_only(model: CausalModel, dtype: torch.dtype) -> None:
    """Compute a text at once, and again in pieces beside another one; raise where they differ.

    They do in a model with a state outside of the cache, with positions that it counts itself, or
    with anything else that takes the packed batch for one text.
    """
    config = model.config
    shape = (2, config.num_layers, 2, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    length = min(_TEXT_LENGTH, model.max_positions)
    text = torch.arange(length) % config.vocab_size
    other = (text * 7 + 5) % config.vocab_size

    def cache() -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.device)

    whole = _compute(model, cache(), [(text, 0)])[-1]
    pieces = cache()
    _compute(model, pieces, [(text[:-1], 0)])
    mixed = _compute(model, pieces, [(text[-1:], length - 1), (other, 0)])
    difference = (mixed[0] - whole).norm() / whole.norm()
    if not difference < _TOLERANCE[dtype]:
        raise ModelError(
            f"{config.architecture} cannot be served: in pieces and beside another text its "
            f"result differs by {difference:.1%}, so tokens meet outside of attention"
        )


def _compute(model: CausalModel, kv_cache: Tensor, parts: list[tuple[Tensor, int]]) -> Tensor:
    """Compute new tokens after so many cached ones, the i-th text in block i; gives all rows."""
    device = kv_cache.device
    tokens = [part for part, _ in parts]
    positions = [torch.arange(len(part)) + start for part, start in parts]
    lens = [len(part) for part in tokens]
    slots = [_BLOCK_SIZE * index + where for index, where in enumerate(positions)]
    batch = AttentionBatch(
        query_starts=torch.tensor([0, *lens]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor([n + s for n, (_, s) in zip(lens, parts, strict=True)]).to(
            device, torch.int32
        ),
        block_tables=torch.arange(len(parts), dtype=torch.int32, device=device)[:, None],
        slot_mapping=torch.cat(slots).to(device),
        num_decodes=int(lens[0] == 1),
        query_lens=tuple(lens),
        context_lens=tuple(start for _, start in parts),
        block_size=_BLOCK_SIZE,
    )
    count = sum(lens)
    step = StepTensors(
        torch.cat(tokens).to(device),
        torch.cat(positions).to(device),
        batch,
        torch.arange(count, device=device),
    )
    return model.hidden(step, kv_cache).float()
