"""Rotary position embedding in the half ("neox") layout."""

import torch
from torch import Tensor


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key [T, heads, head_dim] by each row's angles [T, rotary_dim / 2].

    Channel i is paired with i + rotary_dim / 2; those from rotary_dim on are passed through.
    Computed in float32; returns the inputs' dtypes.
    """
    # x · (cos, cos) + roll(x) · (-sin, sin): on 2 Zen 4 cores 13 us for [8, 12, 64] float32 against
    # 15 us for two halves and a concatenation, 35 against 58 us at 64 rows.
    cosine = torch.cat((cos, cos), dim=-1).float()[:, None, :]
    sine = torch.cat((-sin, sin), dim=-1).float()[:, None, :]
    return _rotate(query, cosine, sine), _rotate(key, cosine, sine)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    rotary_dim = cosine.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = _rotate(x[..., :rotary_dim], cosine, sine)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
    wide = x.float()
    swapped = torch.roll(wide, wide.shape[-1] // 2, dims=-1)
    return (wide * cosine).addcmul_(swapped, sine).to(x.dtype)
