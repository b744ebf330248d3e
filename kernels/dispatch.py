"""Which form of an operation runs on a tensor's device."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from inferq.kernels.native.library import DTYPE_CODES, native_function


def runs_triton(x: Tensor) -> bool:
    """Whether the operations on x run as Triton kernels: on CUDA, unless it is not installed."""
    return x.is_cuda and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def native_for(x: Tensor, name: str, signature: str) -> Callable[..., None] | None:
    """Return the native kernel if it can run on x: on the CPU, with dense rows of a known dtype."""
    if not x.is_cpu or x.dtype not in DTYPE_CODES or x.stride(-1) != 1:
        return None
    return native_function(name, signature)
