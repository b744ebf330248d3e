"""How much memory loading takes, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

Make = Callable[..., Any]

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
from inferq.worker.model.config import ModelConfig
from inferq.worker.model.linear import Linear, LinearMethod
from inferq.worker.model.loader import load_weights
from inferq.worker.model.transformer import Decoder

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
    result = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    peak, afterwards = (int(part) / size for part in result.stdout.split())
    assert 0.95 < peak < 1.2, f"{peak:.3f} of {size / 2**20:.0f} MiB, {afterwards:.3f} afterwards"
