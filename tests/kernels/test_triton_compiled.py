"""Compiles every Triton kernel for GPUs that are not here, and reads what the compilers made."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
backend = pytest.importorskip("triton.backends.nvidia")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from inferq.kernels import (  # noqa: E402
    triton_decode,
    triton_kv_write,
    triton_prefill,
    triton_schedule,
)
from inferq.kernels.triton_pages import FP_FUSION  # noqa: E402

# Shared memory that one block may use, in bytes (CUDA C++ Programming Guide, compute capabilities).
# sm_80 has 163 KiB, but what is compiled for it must run on sm_86, sm_89 and sm_120 as well.
SHARED_LIMITS = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
ARCHITECTURES = pytest.mark.parametrize("capability", SHARED_LIMITS)
TYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
INTEGER_POINTERS = ("table", "seq_len", "query_start", "tile", "item", "start")
# Arguments of any value; all other strides are multiples of 16 in every cache that we make.
UNALIGNED = {"window", "items", "table_stride", "kv_heads", "rows", "programs", "min_tokens"}
UNALIGNED |= {"table_ptr", "seq_len_ptr", "query_start_ptr", "tile_ptr", "slot_ptr"}

BF16 = torch.bfloat16
SHAPES = [
    pytest.param(64, BF16, False, False, id="64-bf16"),
    pytest.param(128, BF16, False, False, id="128-bf16"),
    pytest.param(256, BF16, False, False, id="256-bf16"),
    pytest.param(80, BF16, True, True, id="80-bf16-window-cap"),
    pytest.param(256, BF16, True, True, id="256-bf16-window-cap"),
]
# float32 caches are for tests and small models: one shape for each row of the tables.
WIDE_SHAPES = [(80, 64), (90, 128), (100, 256)]


def compile_kernel(
    kernel: Any, dtype: torch.dtype, constants: dict[str, Any], capability: int, **options: Any
) -> Any:
    """Compile as the launcher would for a dtype."""
    options |= {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    options |= FP_FUSION
    values = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: _type(name, values, TYPE_NAMES[dtype]) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name][0] in "*i" and name not in UNALIGNED
    }
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type(name: str, constants: dict[str, Any], dtype: str) -> str:
    if name in constants:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "fp32" if name in ("scale", "soft_cap") else "i32"
    stem = name.removesuffix("_ptr")
    if stem == "slot":
        return "*i64"
    if stem in ("partial", "lse"):
        return "*fp32"
    return "*i32" if stem in INTEGER_POINTERS else f"*{dtype}"


def stack_bytes(compiled: Any) -> int:
    """Give the bytes of stack for each thread in the machine code: where spilled registers go."""
    cuobjdump = Path(backend.__file__).parent / "bin" / "cuobjdump"
    cubin = Path(_cubin_path(compiled))
    command = [str(cuobjdump), "--dump-resource-usage", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1])


def _cubin_path(compiled: Any) -> str:
    (path,) = [path for name, path in compiled.metadata_group.items() if name.endswith(".cubin")]
    return str(path)


def assert_fits(compiled: Any, capability: int) -> None:
    assert stack_bytes(compiled) == 0
    assert compiled.metadata.shared <= SHARED_LIMITS[capability]


def assert_loads_16_bytes(ptx: str) -> None:
    """Assert that keys and values come in 16-byte loads, and only page numbers in 4-byte ones."""
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+)(?:, [^;]*)?;", ptx)
    loads = re.findall(r"ld\.global[\w.:]*", ptx)
    assert len(copies) == len(re.findall(r"cp\.async\.c[ag]", ptx))
    assert "0x10" in copies
    assert set(copies) <= {"0x10", "0x4"}
    assert set(loads) <= {"ld.global.v4.b32", "ld.global.b32"}


def keys_in_flight(compiled: Any) -> int:
    """Give how many tiles of keys have room in shared memory: with one, loads wait for products."""
    found = re.findall(
        r"ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x", compiled.asm["ttgir"]
    )
    return min(int(buffers) for buffers, *_ in found)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compile_decode(
    head_dim: int, dtype: torch.dtype, capability: int, *, group: int = 4, **flags: Any
) -> Any:
    constants = triton_decode.decode_constants(
        head_dim,
        group,
        16,
        dtype,
        window=flags.pop("window", False),
        soft_cap=flags.pop("soft_cap", False),
        split=flags.pop("split", True),
        tile=triton_decode.decode_tile(head_dim, dtype.itemsize, capability),
    )
    return compile_kernel(triton_decode._decode_kernel, dtype, constants, capability, **flags)


def compile_prefill(
    head_dim: int,
    dtype: torch.dtype,
    capability: int,
    *,
    window: bool = False,
    soft_cap: bool = False,
    group: int = 4,
) -> Any:
    constants = triton_prefill.prefill_constants(
        head_dim,
        group,
        16,
        dtype,
        window=window,
        soft_cap=soft_cap,
        tile=triton_prefill.prefill_tile(head_dim, dtype.itemsize, capability),
    )
    return compile_kernel(triton_prefill._prefill_kernel, dtype, constants, capability)


@ARCHITECTURES
@pytest.mark.parametrize(("head_dim", "dtype", "window", "soft_cap"), SHAPES)
def test_decode_uses_tensor_cores_and_wide_loads_and_spills_nothing(
    capability, head_dim, dtype, window, soft_cap
):
    compiled = compile_decode(head_dim, dtype, capability, window=window, soft_cap=soft_cap)
    assert_fits(compiled, capability)
    assert "mma.sync" in compiled.asm["ptx"]  # wgmma's smallest M is 64, a decode has 16 rows
    assert_loads_16_bytes(compiled.asm["ptx"])
    assert keys_in_flight(compiled) >= 2


@ARCHITECTURES
@pytest.mark.parametrize(("head_dim", "dtype", "window", "soft_cap"), SHAPES)
def test_prefill_uses_tensor_cores_and_wide_loads_and_spills_nothing(
    capability, head_dim, dtype, window, soft_cap
):
    compiled = compile_prefill(head_dim, dtype, capability, window=window, soft_cap=soft_cap)
    assert_fits(compiled, capability)
    expected = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    assert expected in compiled.asm["ptx"]
    assert_loads_16_bytes(compiled.asm["ptx"])
    assert keys_in_flight(compiled) >= 2


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("compile_form", [compile_decode, compile_prefill])
def test_other_numbers_of_heads_spill_nothing(compile_form, group):
    assert_fits(compile_form(128, BF16, 90, group=group), 90)


def test_decodes_that_are_not_split_spill_nothing():
    assert_fits(compile_decode(128, BF16, 90, split=False), 90)


@pytest.mark.parametrize(("capability", "head_dim"), WIDE_SHAPES)
@pytest.mark.parametrize("compile_form", [compile_decode, compile_prefill])
def test_float32_caches_spill_nothing(compile_form, capability, head_dim):
    compiled = compile_form(head_dim, torch.float32, capability)
    assert_fits(compiled, capability)
    assert re.search("mma", compiled.asm["ptx"])
    assert_loads_16_bytes(compiled.asm["ptx"])


@ARCHITECTURES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_reduce_kernel_spills_nothing(capability, head_dim):
    constants = triton_decode.reduce_constants(head_dim)
    compiled = compile_kernel(triton_decode._reduce_kernel, BF16, constants, capability)
    assert_fits(compiled, capability)


@ARCHITECTURES
def test_the_schedule_kernel_spills_nothing(capability):
    constants = triton_schedule.schedule_constants(256, 128, window=True)
    compiled = compile_kernel(triton_schedule._schedule_kernel, BF16, constants, capability)
    assert_fits(compiled, capability)


@ARCHITECTURES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kv_write_moves_16_bytes_at_a_time(capability, head_dim):
    constants = triton_kv_write.kv_write_constants(8, head_dim, 16)
    compiled = compile_kernel(triton_kv_write._kv_write_kernel, BF16, constants, capability)
    assert_fits(compiled, capability)
    ptx = compiled.asm["ptx"]
    assert set(re.findall(r"ld\.global[\w.:]*", ptx)) == {"ld.global.b64", "ld.global.v4.b32"}
    assert set(re.findall(r"st\.global[\w.:]*", ptx)) == {"st.global.v4.b32"}


def test_the_measure_of_spills_sees_spills():
    """Compile the decode kernel with too few registers on purpose."""
    assert stack_bytes(compile_decode(128, BF16, 80, maxnreg=32)) > 0


def test_addresses_are_computed_in_64_bits():
    """A cache of more than 2^31 elements has blocks beyond a 32-bit offset."""
    ttir = compile_decode(128, BF16, 80).asm["ttir"]
    assert "arith.muli" in ttir
    products = re.findall(r"arith\.muli .*: tensor<64x?1?xi(\d+)>", ttir)
    assert products
    assert set(products) == {"64"}
