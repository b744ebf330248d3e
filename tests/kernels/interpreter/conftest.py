"""Make Triton's interpreter strict (fresh memory is NaN) and able to multiply bfloat16."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from inferq.kernels.triton_attention import TritonAttention

_POISON = 77  # of integers: no plausible count, block or token of these tests


@pytest.fixture
def ops() -> TritonAttention:
    return TritonAttention(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what the launchers allocate, so that what no kernel wrote is seen."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poisoned(*arguments: Any, **options: Any) -> Tensor:
        tensor = allocate(*arguments, **options)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else _POISON)

    return poisoned


@pytest.fixture(autouse=True)
def _bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widen bfloat16 operands: the interpreter multiplies their bit patterns as integers."""
    create_dot = InterpreterBuilder.create_dot

    def widened(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return create_dot(self, _widen(a), _widen(b), d, *options)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", widened)


@pytest.fixture(autouse=True)
def _device_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute CUDA's exp and log as torch does: the interpreter has no form of them."""
    for function in (torch.exp, torch.log):
        monkeypatch.setattr(libdevice, function.__name__, _interpreted(function))


def _interpreted(function: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    def interpreted(argument: Any) -> Any:
        values = function(torch.from_numpy(np.array(argument.handle.data))).numpy()
        return tl.tensor(TensorHandle(values, tl.float32), argument.type)

    return interpreted


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
