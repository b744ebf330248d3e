"""Section: the kernels around attention, as a share of the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from gpu import check_matmul, interpreter
from gpu.check_sampling import PARAMETERS, sampled, sampling_parameters
from gpu.paged_case import LLAMA, batch_of, shuffled_tables
from gpu.records import Quantity, Record
from gpu.section import Case, Settings
from gpu.timing import Call, copy_bandwidth, graph_seconds, normal
from inferq.kernels.attention import attention_ops

#: Bytes that the calls of one round touch together: beyond the L2 cache.
_ROUND_BYTES = 512 << 20
_MAX_CALLS = 64
#: Llama-3-8B.
_HIDDEN, _INNER, _VOCAB = 4096, 14336, 128_256

#: What makes a call on fresh inputs, and the bytes that it must move at least.
Maker = Callable[[], tuple[Call, int]]


class _Bench:
    """Times kernels over rotating inputs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def bandwidth(self) -> float:
        return copy_bandwidth(self.settings)

    def measure(self, name: str, make: Maker, operations: int = 0) -> Record:
        bandwidth = self.bandwidth
        call, moved = make()
        calls = [call]
        if not self.settings.smoke:
            count = max(4, min(_MAX_CALLS, _ROUND_BYTES // moved))
            calls += [make()[0] for _ in range(count - 1)]
        seconds = graph_seconds(lambda: calls, self.settings)
        quantities = {
            "time": Quantity(seconds * 1e6, "us"),
            "bandwidth": Quantity(moved / seconds / 1e9, "GB/s"),
            "share": Quantity(moved / seconds / bandwidth, "of copy bandwidth"),
        }
        if operations:
            quantities["rate"] = Quantity(operations / seconds / 1e12, "TFLOP/s")
        return Record(name, quantities)

    def values(self, *shape: int) -> Tensor:
        return normal(self.settings, *shape)


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: each kernel at a decode's and a prefill's number of rows."""
    interpreter.complete()
    bench = _Bench(settings)
    for name, measure in _KERNELS.items():

        def run(name: str = name, measure: _Measure = measure) -> Iterator[Record]:
            for rows in (2,) if settings.smoke else (1, 64, 256, 8192):
                yield measure(f"{name}, {rows} rows", rows, bench)

        yield Case(name, run)
    for name, sample in _SAMPLING.items():

        def draw(name: str = name, sample: _Measure = sample) -> Iterator[Record]:
            for rows in (2,) if settings.smoke else (1, 64, 256):
                yield sample(f"{name}, {rows} rows", rows, bench)

        yield Case(name, draw)
    yield Case("awq_linear", lambda: _awq(bench))


_Measure = Callable[[str, int, _Bench], Record]


def _norm(name: str, rows: int, bench: _Bench) -> Record:
    from inferq.kernels.triton_norm import add_rms_norm

    hidden = 64 if bench.settings.smoke else _HIDDEN
    weight = bench.values(hidden)

    def make() -> tuple[Call, int]:
        x, residual = bench.values(rows, hidden), bench.values(rows, hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes + weight.nbytes

    return bench.measure(name, make)


def _rotary(name: str, rows: int, bench: _Bench) -> Record:
    from inferq.kernels.triton_rotary import rotary

    angles = torch.rand(rows, LLAMA.dim // 2, device=bench.settings.device)
    cos, sin = angles.cos(), angles.sin()

    def make() -> tuple[Call, int]:
        qkv = bench.values(rows, LLAMA.query + 2 * LLAMA.kv, LLAMA.dim)
        query, key, _ = torch.split(qkv, [LLAMA.query, LLAMA.kv, LLAMA.kv], dim=1)
        moved = 2 * (query.numel() + key.numel()) * qkv.element_size() + 2 * cos.nbytes
        return lambda: rotary(query, key, cos, sin), moved

    return bench.measure(name, make)


def _activation(name: str, rows: int, bench: _Bench) -> Record:
    from inferq.kernels import triton_activation

    function = getattr(triton_activation, name.split(",")[0])
    inner = 64 if bench.settings.smoke else _INNER

    def make() -> tuple[Call, int]:
        gate_up = bench.values(rows, 2 * inner)
        return lambda: function(gate_up), gate_up.nbytes * 3 // 2

    return bench.measure(name, make)


def _kv_write(name: str, rows: int, bench: _Bench) -> Record:
    device = bench.settings.device
    sequences = [(15, 1)] * rows
    tables, blocks = shuffled_tables(sequences, 16, device)
    ops = attention_ops(device, "triton")
    plan = ops.plan(batch_of(sequences, tables, 16))

    def make() -> tuple[Call, int]:
        kv = bench.values(blocks, 1, 2, 16, LLAMA.kv, LLAMA.dim)
        qkv = bench.values(rows, LLAMA.query + 2 * LLAMA.kv, LLAMA.dim)
        _, key, value = torch.split(qkv, [LLAMA.query, LLAMA.kv, LLAMA.kv], dim=1)
        moved = 4 * key.numel() * key.element_size()
        return lambda: ops.write_kv(key, value, kv[:, 0], plan), moved

    return bench.measure(name, make)


def _block_copy(name: str, rows: int, bench: _Bench) -> Record:
    """Gather blocks of a Llama-3-8B cache, as a swap does before it leaves the device."""
    from inferq.kernels.triton_block_copy import gather_blocks

    count = min(rows, 256)
    shape = (2, 2, 16, 2, 64) if bench.settings.smoke else (32, 2, 16, LLAMA.kv, LLAMA.dim)
    blocks = bench.values(2 * count, *shape)
    staging = torch.empty_like(blocks[:count])
    index = torch.randperm(2 * count, device=bench.settings.device)[:count]
    return bench.measure(
        f"{name} ({count} blocks)",
        lambda: (lambda: gather_blocks(blocks, index, staging), 2 * staging.nbytes),
    )


_KERNELS: dict[str, _Measure] = {
    "add_rms_norm": _norm,
    "rotary": _rotary,
    "silu_and_mul": _activation,
    "gelu_and_mul": _activation,
    "kv_write": _kv_write,
    "gather_blocks": _block_copy,
}


def _sample(name: str, rows: int, bench: _Bench) -> Record:
    vocab = 96 if bench.settings.smoke else _VOCAB
    kind = name.split(": ")[1].split(",")[0]
    parameters = sampling_parameters(kind, rows, bench.settings)
    columns = [parameters[name] for name in PARAMETERS]

    def make() -> tuple[Call, int]:
        logits = torch.randn(rows, vocab, device=bench.settings.device)

        def call() -> object:
            return sampled(
                logits,
                columns,
                vocab,
                with_draws=kind != "greedy",
                with_top_k=kind in ("top_k", "all of them"),
                with_top_p=kind in ("top_p", "all of them"),
            )

        return call, logits.nbytes

    return bench.measure(name, make)


_SAMPLING: dict[str, _Measure] = {
    f"sample_tokens: {kind}": _sample for kind in ("greedy", "plain", "top_p", "all of them")
}


def _awq(bench: _Bench) -> Iterator[Record]:
    """Time an int4 product, and beside it the same with plain weights."""
    from inferq.kernels.awq import awq_linear

    settings = bench.settings
    inputs, outputs = (64, 64) if settings.smoke else (_HIDDEN, _INNER)
    group = 32 if settings.smoke else check_matmul.GROUP
    for rows in (2,) if settings.smoke else (1, 16, 64, 256, 2048):
        x = bench.values(rows, inputs)

        def packed(x: Tensor = x) -> tuple[Call, int]:
            weights = check_matmul.random_awq(
                inputs, outputs, group, settings.dtype, settings.device
            )
            moved = sum(part.nbytes for part in weights) + x.nbytes
            return lambda: awq_linear(x, *weights, group), moved

        def plain(x: Tensor = x) -> tuple[Call, int]:
            weight = bench.values(outputs, inputs)
            return lambda: torch.nn.functional.linear(x, weight), weight.nbytes + x.nbytes

        operations = 2 * rows * inputs * outputs
        yield bench.measure(f"awq_linear, {rows} rows", packed, operations)
        yield bench.measure(f"plain linear, {rows} rows", plain, operations)
