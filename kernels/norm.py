"""Root mean square normalisation."""

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension in float32 and scale by weight; returns x.dtype."""
    # Fused for every dtype as long as both agree. [8, 576] float32 on 2 Zen 4 cores: 13 us, and
    # 17 us for the same written out.
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rms_norm(residual + x) and residual + x, for which `residual` may be overwritten."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual
