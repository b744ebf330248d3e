"""Rotary position embedding in the half ("neox") layout."""

import torch
from torch import Tensor

from inferq.kernels.dispatch import native_for, runs_triton
from inferq.kernels.native.library import DTYPE_CODES


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate query and key [T, heads, head_dim] by each row's angles [T, rotary_dim / 2].

    Channel i is paired with i + rotary_dim / 2; those from rotary_dim on are passed through.
    Computed in float32; returns the inputs' dtypes. The inputs may be overwritten.
    """
    if runs_triton(query):
        from inferq.kernels import triton_rotary

        return triton_rotary.rotary(query, key, cos, sin)
    kernel = native_for(query, "inferq_rotary", "ppppllllllllli")
    if kernel is None or not _suits_native(query, key, cos, sin):
        return _in_torch(query, key, cos, sin)
    kernel(
        query.data_ptr(),
        key.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        *cos.shape,
        cos.stride(0),
        query.shape[1],
        *query.stride()[:2],
        key.shape[1],
        *key.stride()[:2],
        DTYPE_CODES[query.dtype],
    )
    return query, key


def _suits_native(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if key.dtype != query.dtype or key.stride(-1) != 1:
        return False
    angles_suit = cos.dtype == sin.dtype == torch.float32 and cos.stride() == sin.stride()
    return angles_suit and cos.stride(-1) == 1 and 2 * cos.shape[1] <= query.shape[2]


def _in_torch(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
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
