"""How much memory loading takes, in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inferq.kernels.native.library import load_native

Make = Callable[..., Any]
GROUP, LAYERS = 64, 70

#: 40 layers of 6 MiB and embeddings of 3 MiB in float32: large beside what libraries take for
#: themselves, which is 10 MiB.
SIZES = {
    "vocab_size": 2000,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}

LOAD = """
import sys
from pathlib import Path
import torch
from inferq.kernels.attention import attention_ops
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.linear import Linear, LinearMethod
from inferq.worker.model.loading.loader import load_weights
from inferq.worker.model.architecture.transformer import Decoder

def memory(name):
    # Not ru_maxrss: a process inherits that of the one it was forked from.
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return 1024 * int(line.split()[1])

torch.set_num_threads(1)
device = torch.device("cpu")
# What the libraries set up once is not the weights'.
warm = Linear(64, 64, bias=False, dtype=getattr(torch, sys.argv[2]), device=device)
warm.weight.zero_()
warm.pack(LinearMethod())
warm(torch.ones(4, 64, dtype=getattr(torch, sys.argv[2])))
config = ModelConfig.read(Path(sys.argv[1]))
if config.quantization is not None:
    projection = config.quantization.projection(["warm"])
    warm = Linear(64, 64, bias=False, dtype=torch.float32, device=device, quantized=projection)
    for _, _, target in warm.stored.targets([64]):
        target.zero_()
    warm.pack(LinearMethod())
    warm(torch.ones(4, 64))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = memory("VmRSS")
decoder = Decoder(
    config,
    max_positions=64,
    dtype=getattr(torch, sys.argv[2]),
    device=device,
    attention=attention_ops(device),
)
load_weights(Path(sys.argv[1]), decoder.weight_groups(), rename=decoder.rename)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
def test_loading_takes_at_most_a_fifth_more_than_the_weights(
    make_model: Make, dtype: str, tied: bool
) -> None:
    folder = make_model(**SIZES, tie_word_embeddings=tied)
    path = folder / "model.safetensors"
    size = path.stat().st_size // (1 if dtype == "float32" else 2)
    peak, afterwards = (part / size for part in measure(folder, dtype))
    assert 0.95 < peak < 1.2, f"{peak:.3f} of {size / 2**20:.0f} MiB, {afterwards:.3f} afterwards"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(load_native() is None, reason="torch's int4 weights are made of int32")
def test_loading_awq_takes_at_most_a_fifth_more_than_the_packed_weights(
    make_model: Make, tmp_path: Path
) -> None:
    # 70 layers, each a copy of one: what is made up need not differ.
    folder = Path(
        shutil.copytree(make_model(**{**SIZES, "num_hidden_layers": 1}), tmp_path / "awq")
    )
    tensors = load_file(folder / "model.safetensors")
    weights = 0
    for name in [name for name in tensors if "layers.0." in name]:
        tensor = tensors.pop(name)
        for index in range(LAYERS):
            copy = name.replace("layers.0.", f"layers.{index}.")
            if tensor.dim() == 1:
                tensors[copy] = tensor.clone()
            else:
                weights += tensor.numel()
                tensors |= awq_of_ones(copy.removesuffix(".weight"), *tensor.shape)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    # In memory a group has a float32 scale and a byte of zero; head and embedding are float32.
    size = weights * (0.5 + 5 / GROUP) + 4 * 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    peak, afterwards = (part / size for part in measure(folder, "float32"))
    assert 0.95 < peak < 1.2, f"{peak:.3f} of {size / 2**20:.0f} MiB, {afterwards:.3f} afterwards"


def awq_of_ones(module: str, outputs: int, inputs: int) -> dict[str, Tensor]:
    """Return a module's tensors, each value and zero 1."""
    words = torch.full((inputs + inputs // GROUP, outputs // 8), 0x11111111, dtype=torch.int32)
    qweight, qzeros = words.split([inputs, inputs // GROUP])
    scales = torch.ones(inputs // GROUP, outputs, dtype=torch.float16)
    return {
        f"{module}.qweight": qweight.clone(),
        f"{module}.qzeros": qzeros.clone(),
        f"{module}.scales": scales,
    }


def measure(folder: Path, dtype: str) -> tuple[int, ...]:
    """Return the bytes that loading took at its peak, and those that it took in the end."""
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return tuple(int(part) for part in result.stdout.split())
