"""Recorded native calls, repeated on what then lies where their inputs lay."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from inferq.kernels.activation import silu_and_mul
from inferq.kernels.huge_pages import HugePages
from inferq.kernels.matmul import pack_float
from inferq.kernels.native.library import load_native, noted_calls
from inferq.kernels.native.recording import CannotRecordError, Recording, WorkMemory
from inferq.kernels.norm import add_rms_norm, rms_norm

SIZE, LAYERS = 96, 12


@pytest.fixture(autouse=True)
def need_native() -> None:
    if load_native() is None:
        pytest.skip("no native kernels here")


@pytest.fixture
def layers() -> Callable[[Tensor], Tensor]:
    """Some layers of products, norms and activations that allocate as a model's do."""
    generator = torch.Generator().manual_seed(0)
    memory, scale = HugePages(), SIZE**-0.5
    weights = [
        pack_float(torch.randn(2 * SIZE, SIZE, generator=generator) * scale, memory)
        for _ in range(LAYERS)
    ]
    norm = torch.rand(SIZE, generator=generator) + 0.5

    def run(x: Tensor) -> Tensor:
        residual, delta = x, rms_norm(x, norm, 1e-5)
        for weight in weights:
            delta = silu_and_mul(weight.multiply(delta, None).view(-1, 2 * SIZE))
            delta, residual = add_rms_norm(delta, residual, norm, 1e-5)
        return delta

    return run


def inputs(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_it_gives_what_the_work_gives_on_other_inputs(
    layers: Callable[[Tensor], Tensor], rows: int
) -> None:
    own = inputs(rows, 0)
    recording = Recording.of(lambda: layers(own))
    assert torch.equal(recording.output, layers(inputs(rows, 0)))
    for seed in range(1, 5):
        own.copy_(inputs(rows, seed))
        # What the work let go is others' now.
        others = [torch.full((size,), torch.nan) for size in range(1, 4000, 7)]
        assert torch.equal(recording.repeat(), layers(inputs(rows, seed)))
        assert all(bool(other.isnan().all()) for other in others)


def test_recordings_do_not_share_memory(layers: Callable[[Tensor], Tensor]) -> None:
    owns = [inputs(2, seed) for seed in range(3)]
    recordings = [Recording.of(lambda own=own: layers(own)) for own in owns]
    for own, seed in zip(owns, range(3), strict=True):
        own.copy_(inputs(2, seed + 10))
    outputs = [recording.repeat() for recording in recordings]
    for seed, output in enumerate(outputs):
        assert torch.equal(output, layers(inputs(2, seed + 10)))


def test_recordings_may_share_memory_in_turns(layers: Callable[[Tensor], Tensor]) -> None:
    memory = WorkMemory()
    owns = [inputs(rows, rows) for rows in (2, 9, 3)]
    recordings = [Recording.of(lambda own=own: layers(own), memory) for own in owns]
    for seed in range(3):
        for own, recording in zip(owns, recordings, strict=True):
            own.copy_(inputs(len(own), seed))
            assert torch.equal(recording.repeat(), layers(inputs(len(own), seed)))
    # What the second one took is large enough for the third.
    addresses = [recording.output.untyped_storage().data_ptr() for recording in recordings]
    assert addresses[0] != addresses[1] == addresses[2]


def test_its_memory_is_what_the_work_holds_at_once(layers: Callable[[Tensor], Tensor]) -> None:
    own = inputs(64, 0)
    recording = Recording.of(lambda: layers(own))
    of_one_layer = 4 * 64 * SIZE * (2 + 1 + 1 + 1)
    assert recording.nbytes <= of_one_layer * LAYERS / 3


@pytest.mark.parametrize(
    ("work", "culprit"),
    [
        (lambda x: x + 1, r"aten\.add"),
        (lambda x: x.to(torch.bfloat16), r"aten\.(_to_copy|to)"),
        (lambda x: x[:, ::2].contiguous(), r"aten\.(clone|contiguous)"),
        (lambda x: x.mul_(2), r"aten\.mul_"),
        (lambda x: torch.zeros(3), r"aten\.zeros"),
        (lambda x: rms_norm(x, torch.ones(SIZE), 1e-5), r"aten\.ones"),
        (lambda x: x.view(-1), "no native calls"),
        (lambda x: (rms_norm(x, x[0], 1e-5), x.view(-1))[1], "output"),
    ],
)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_no_native_call_is_refused(
    work: Callable[[Tensor], Tensor], culprit: str, mode: Callable[[], torch.no_grad]
) -> None:
    with mode():
        x = inputs(2, 0)
        with pytest.raises(CannotRecordError, match=culprit):
            Recording.of(lambda: work(x))
    assert noted_calls.get() is None


def test_calls_of_other_threads_are_not_recorded(layers: Callable[[Tensor], Tensor]) -> None:
    own, other = inputs(2, 0), inputs(2, 1)

    def work() -> Tensor:
        beside = threading.Thread(target=lambda: layers(other))
        beside.start()
        beside.join()
        return layers(own)

    recording = Recording.of(work)
    alone = Recording.of(lambda: layers(own))
    assert recording.num_calls == alone.num_calls > LAYERS
