"""Compiles the Triton kernels besides attention for GPUs that are not here."""

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
    triton_activation,
    triton_awq,
    triton_block_copy,
    triton_gumbel,
    triton_norm,
    triton_ranking,
    triton_rotary,
    triton_sampling,
)
from inferq.kernels.triton_pages import FP_FUSION  # noqa: E402

# Shared memory that one block may use, in bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ARCHITECTURES = pytest.mark.parametrize("capability", SHARED_LIMITS)
OPTIONS = ("num_warps", "num_stages")
VOCABULARY = 151_936

# The types of pointers, by name; all others are bfloat16 tensors. Scalars are int32 but for eps.
POINTERS = {
    "*i32": "weight zero prefix cut_key end_key equal token greedy",
    "*i64": "left cut_left sum end_left source top_k seed child position",
    "*fp32": "cos sin partial highest logit temperature top_p least noisy score row_highest",
    "*fp16": "scale",
}
TYPES = {f"{name}_ptr": kind for kind, names in POINTERS.items() for name in names.split()}
# Of any value in a launch, beside what is not specialized; all others are multiples of 16.
UNALIGNED = {"heads", "kv_heads", "residual_head_stride"}


def compile_kernel(kernel: Any, constants: dict[str, Any], capability: int, **types: str) -> Any:
    """Compile as the launcher would for aligned tensors."""
    values = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {}
    for name in kernel.arg_names:
        default = "*bf16" if name.endswith("_ptr") else "fp32" if name == "eps" else "i32"
        kind = types.get(name, TYPES.get(name, default))
        signature[name] = "constexpr" if name in values else kind
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name][0] in "*i"
        and name not in UNALIGNED
        and not kernel.params[index].do_not_specialize
    }
    options = {name: constants[name] for name in OPTIONS if name in constants} | FP_FUSION
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert stack_bytes(compiled) == 0
    assert compiled.metadata.shared <= SHARED_LIMITS[capability]
    return compiled


def stack_bytes(compiled: Any) -> int:
    """Give the bytes of stack for each thread in the machine code: where spilled registers go."""
    cuobjdump = Path(backend.__file__).parent / "bin" / "cuobjdump"
    (cubin,) = [p for name, p in compiled.metadata_group.items() if name.endswith(".cubin")]
    command = [str(cuobjdump), "--dump-resource-usage", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", done.stdout)
    assert found, done.stdout
    return int(found[1])


def accesses(compiled: Any, kind: str) -> set[str]:
    return set(re.findall(rf"{kind}\.global[\w.:]*", compiled.asm["ptx"]))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@ARCHITECTURES
@pytest.mark.parametrize(("size", "add"), [(128, False), (576, True), (16384, True)])
def test_norms_load_16_bytes(capability, size, add):
    constants = triton_norm.rms_norm_constants(size, add=add)
    compiled = compile_kernel(
        triton_norm._rms_norm_kernel, constants, capability, weight_ptr="*bf16"
    )
    assert "ld.global.v4.b32" in accesses(compiled, "ld")
    assert "st.global.v4.b32" in accesses(compiled, "st")


@ARCHITECTURES
def test_rotary_loads_16_bytes(capability):
    constants = triton_rotary.rotary_constants(64, 40)
    compiled = compile_kernel(triton_rotary._rotary_kernel, constants, capability)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")
    assert accesses(compiled, "st") == {"st.global.v4.b32"}


@ARCHITECTURES
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_activations_load_16_bytes(capability, gelu):
    constants = triton_activation.gate_and_mul_constants(14336, gelu=gelu)
    compiled = compile_kernel(triton_activation._gate_and_mul_kernel, constants, capability)
    assert accesses(compiled, "ld") == {"ld.global.v4.b32"}
    assert accesses(compiled, "st") == {"st.global.v4.b32"}


@ARCHITECTURES
def test_block_copies_move_16_bytes(capability):
    # Llama-3-8B: 32 layers, 16 tokens, 8 heads of 128.
    size = 32 * 2 * 16 * 8 * 128 * 2 // 8
    constants = triton_block_copy.copy_constants(size, gather=True, scatter=True)
    pointers = {f"{name}_ptr": "*i64" for name in ("target", "source")}
    pointers |= {f"{name}_index_ptr": "*i64" for name in ("target", "source")}
    compiled = compile_kernel(triton_block_copy._copy_kernel, constants, capability, **pointers)
    assert accesses(compiled, "st") == {"st.global.v2.b64"}
    assert "ld.global.v2.b64" in accesses(compiled, "ld")


def assert_exact(compiled: Any) -> None:
    """Assert that logarithms, exponentials and divisions are those of torch's CUDA kernels."""
    ptx = compiled.asm["ptx"]
    assert "lg2.approx" not in ptx
    assert not re.findall(r"div\.(?:approx|full)", ptx)


@ARCHITECTURES
@pytest.mark.parametrize("kernel", ["_vocabulary_kernel", "_tokens_kernel"])
def test_noise_spills_nothing(capability, kernel):
    constants = {"TILE": triton_gumbel._TILE}
    types = {"out_ptr": "*fp32", "token_ptr": "*i64"}
    assert_exact(compile_kernel(getattr(triton_gumbel, kernel), constants, capability, **types))


@ARCHITECTURES
@pytest.mark.parametrize("mass", [False, True])
def test_the_search_spills_nothing_and_loads_16_bytes(capability, mass):
    constants = triton_ranking.search_constants(VOCABULARY, has_sources=False)
    compiled = compile_kernel(triton_ranking._search_kernel, constants | {"MASS": mass}, capability)
    assert_exact(compiled)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")


@ARCHITECTURES
def test_the_ends_spill_nothing_and_load_16_bytes(capability):
    constants = triton_ranking.search_constants(VOCABULARY, has_sources=False)
    compiled = compile_kernel(triton_ranking._end_kernel, constants, capability)
    assert_exact(compiled)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")


@ARCHITECTURES
@pytest.mark.parametrize("limits", [False, True])
def test_draws_spill_nothing_and_load_16_bytes(capability, limits):
    constants = triton_sampling.slice_constants(VOCABULARY, has_sources=True)
    compiled = compile_kernel(
        triton_sampling._draw_kernel, constants | {"LIMITS": limits}, capability
    )
    assert_exact(compiled)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")


@ARCHITECTURES
def test_the_kernels_before_and_after_a_draw_spill_nothing(capability):
    constants = triton_sampling.slice_constants(VOCABULARY, has_sources=False)
    compiled = compile_kernel(triton_sampling._highest_kernel, constants, capability)
    assert accesses(compiled, "ld") == {"ld.global.v4.b32"}
    compile_kernel(triton_sampling._choose_kernel, constants, capability, out_ptr="*i64")


@ARCHITECTURES
@pytest.mark.parametrize(("tokens", "dtype"), [(16, "bf16"), (64, "fp16"), (128, "bf16")])
def test_the_awq_product_uses_tensor_cores_and_wide_loads(capability, tokens, dtype):
    constants = triton_awq.gemm_constants(
        tokens, 4096, 128, torch.bfloat16, capability // 10, split=tokens == 16
    )
    types = {"x_ptr": f"*{dtype}", "out_ptr": "*fp32" if tokens == 16 else f"*{dtype}"}
    compiled = compile_kernel(triton_awq._gemm_kernel, constants, capability, **types)
    wide = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
    ptx = compiled.asm["ptx"]
    assert ("mma.sync" if tokens == 16 else wide[capability]) in ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+)(?:, [^;]*)?;", ptx)
    # x and the words come in 16 bytes; zeros and scales, one row of each a step, in fewer.
    tile_bytes = constants["K"] * (2 * constants["M"] + constants["N"] // 2)
    per_step = tile_bytes // (16 * 32 * constants["num_warps"])
    assert copies.count("0x10") >= per_step * (constants["num_stages"] - 1)


@ARCHITECTURES
def test_dequantizing_and_joining_splits_spill_nothing(capability):
    constants = triton_awq.dequantize_constants(128)
    compiled = compile_kernel(triton_awq._dequantize_kernel, constants, capability)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")
    assert accesses(compiled, "st") == {"st.global.v4.b32"}
    constants = {"TILE": triton_awq._REDUCE_TILE}
    compiled = compile_kernel(triton_awq._reduce_kernel, constants, capability)
    assert "ld.global.v4.b32" in accesses(compiled, "ld")
