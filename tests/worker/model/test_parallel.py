"""Models that are divided among ranks: the shares, their loading, and the joined results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import HashStore

from inferq.kernels.attention import AttentionBatch
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.causal_model import StepTensors
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.loading import loader
from inferq.worker.model.loading.loader import load_weights
from inferq.worker.model.loading.model_loading import load_decoder
from inferq.worker.model.ranks.parallel import Share, check_devices, check_division
from inferq.worker.model.ranks.parallel_decoder import ParallelDecoder
from inferq.worker.model.ranks.parallel_group import RankGroup
from inferq.worker.model.running import kv_cache, runner
from inferq.worker.model.running.kv_cache import KVCacheShape, cpu_budget, swap_pool_size

Make = Callable[..., Any]
CPU = torch.device("cpu")
TEXT = [5, 9, 11, 60, 7, 7, 30, 96, 3, 2, 1, 0]


def load_rank(folder: Path, group: RankGroup, **options: Any) -> Decoder:
    return load_decoder(
        folder,
        ModelConfig.read(folder),
        EngineConfig(model=str(folder), **options),
        max_model_len=64,
        dtype=torch.float32,
        device=CPU,
        load=load_weights,
        group=group,
    )


@torch.inference_mode()
def logits_of_rank(folder: Path, rank: int, size: int, store: HashStore, **options: Any) -> Tensor:
    """Compute `TEXT` in two steps on one rank; gives the logits [tokens, vocabulary] of rank 0."""
    model = ModelConfig.read(folder)
    group = RankGroup(rank, size, CPU)
    decoder = load_rank(folder, group, **options)
    group.connect(store)
    shape = KVCacheShape.of(Share(model, rank, size).config, 16, torch.float32)
    blocks = shape.allocate(2, CPU)
    parts = []
    for first, count in ((0, 8), (8, len(TEXT) - 8)):
        positions = torch.arange(first, first + count)
        batch = AttentionBatch(
            query_starts=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([first + count], dtype=torch.int32),
            block_tables=torch.tensor([[1]], dtype=torch.int32),
            slot_mapping=16 + positions,
            num_decodes=0,
            query_lens=(count,),
            context_lens=(first,),
            block_size=16,
        )
        tokens = torch.tensor(TEXT[first : first + count])
        step = StepTensors(tokens, positions, batch, torch.arange(count))
        parts.append(decoder.logits(decoder.hidden(step, blocks)))
    return torch.cat(parts)


def logits_of_ranks(folder: Path, size: int, **options: Any) -> Tensor:
    """Run all ranks as threads of this process, over the same gloo as between processes."""
    store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        ranks = [
            threads.submit(logits_of_rank, folder, rank, size, store, **options)
            for rank in range(size)
        ]
        return ranks[0].result(60)


SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "num_key_value_heads": 4}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}
#: Of Gemma: queries are scaled, and some layers see a window.
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}


@pytest.mark.parametrize(
    ("family", "size", "settings"),
    [
        ("Llama", 2, {"attention_bias": True, "mlp_bias": True}),
        ("Llama", 4, {"tie_word_embeddings": True}),
        ("Llama", 2, {"num_key_value_heads": 1}),
        ("Llama", 3, {**SIX_HEADS, "num_key_value_heads": 3}),
        ("Llama", 6, {**SIX_HEADS, "num_key_value_heads": 2}),
        ("Qwen2", 4, {}),
        ("Qwen3", 2, {"head_dim": 16}),
        ("Phi3", 2, {"pad_token_id": 0}),
        ("Gemma2", 4, GEMMA),
        ("Gemma3Text", 2, GEMMA),
        ("GPT2", 4, GPT2),
        ("OPT", 2, OPT),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_ranks_together_compute_what_transformers_does(
    make_model: Make,
    reference_logits: Make,
    family: str,
    size: int,
    settings: dict[str, Any],
) -> None:
    folder = make_model(family, **settings)
    result = logits_of_ranks(folder, size)
    expected = reference_logits(folder, TEXT)
    assert result.shape == expected.shape
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


def test_ranks_divide_weights_of_eight_bits(make_model: Make) -> None:
    """The head is packed too, and embeddings are read back from it."""
    folder = make_model(tie_word_embeddings=True)
    expected = logits_of_ranks(folder, 1, quantization="int8")
    result = logits_of_ranks(folder, 2, quantization="int8")
    # Activations are rounded in groups of their own on each rank.
    assert (result - expected).norm() / expected.norm() < 0.05


class RecordingFile:
    """An open safetensors file that keeps the shapes of what is read."""

    def __init__(self, file: Any, read: dict[str, int]) -> None:
        self._file, self._read = file, read

    def keys(self) -> Any:
        return self._file.keys()

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return self._count(name, tensor)

    def get_slice(self, name: str) -> Any:
        return RecordingSlice(self._file.get_slice(name), lambda part: self._count(name, part))

    def _count(self, name: str, part: Tensor) -> Tensor:
        self._read[name] = self._read.get(name, 0) + part.numel()
        return part


class RecordingSlice:
    def __init__(self, part: Any, count: Callable[[Tensor], Tensor]) -> None:
        self._part, self._count = part, count
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._count(self._part[index])


@pytest.mark.parametrize(
    ("family", "settings"), [("Llama", {}), ("Phi3", {"pad_token_id": 0}), ("GPT2", GPT2)]
)
def test_a_rank_reads_its_slices_and_nothing_else(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, family: str, settings: dict[str, Any]
) -> None:
    folder = make_model(family, vocab_size=96, **settings)
    read: dict[str, int] = {}
    opened = loader.safe_open
    sizes: dict[str, int] = {}
    with opened(folder / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            sizes[name] = math.prod(file.get_slice(name).get_shape())

    class Recording:
        def __init__(self, path: Path, framework: str) -> None:
            self._context = opened(path, framework=framework)

        def __enter__(self) -> RecordingFile:
            return RecordingFile(self._context.__enter__(), read)

        def __exit__(self, *error: object) -> None:
            self._context.__exit__(*error)

    monkeypatch.setattr(loader, "safe_open", Recording)
    load_rank(folder, RankGroup(1, 2, CPU))
    whole = {name for name, size in sizes.items() if read[name] == size}
    halves = {name for name, size in sizes.items() if 2 * read[name] == size}
    assert whole | halves == set(sizes)
    # What every rank has: norms, biases of sums, learned positions.
    assert all(
        "norm" in name or "ln_" in name or "wpe" in name or name.endswith("c_proj.bias")
        for name in whole
    )
    assert len(halves) > len(sizes) // 3


@pytest.mark.parametrize(
    ("size", "settings", "message"),
    [
        (
            2,
            {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
            "9 attention heads cannot be divided among 2 ranks; possible: 1, 3",
        ),
        (
            3,
            {**SIX_HEADS, "intermediate_size": 64},
            r"64 inner rows of the MLP \(intermediate_size\) cannot be divided among 3 ranks",
        ),
        (
            4,
            {"hidden_size": 192, "num_attention_heads": 12, "num_key_value_heads": 6},
            "6 KV heads can neither be divided among 4 ranks, nor repeated evenly; "
            "possible: 1, 2, 3, 6, 12",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    make_model: Make, size: int, settings: dict[str, Any], message: str
) -> None:
    folder = make_model(**settings)
    with pytest.raises(ModelError, match=f"^tensor_parallel_size: {message}"):
        check_division(ModelConfig.read(folder), size)


def test_each_rank_needs_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(2, torch.device("cuda"))
    check_devices(64, CPU)
    with pytest.raises(ModelError, match="4 ranks need 4 GPUs, one each, but there are 2"):
        check_devices(4, torch.device("cuda"))
    with pytest.raises(ModelError, match="from 0 on, but the device is cuda:1"):
        check_devices(2, torch.device("cuda:1"))


def test_a_stored_tensor_of_another_shape_is_named_with_its_whole_shape(
    make_model: Make, tmp_path: Path
) -> None:
    folder = make_model()
    config = (folder / "config.json").read_text()
    assert '"intermediate_size": 96' in config
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_text(
        config.replace('"intermediate_size": 96', '"intermediate_size": 100')
    )
    (wrong / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=r"has shape \[64, 96\]; config.json asks for \[64, 100\]"):
        load_rank(wrong, RankGroup(0, 2, CPU))


@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_ranks_divide_weights_of_four_bits(
    make_model: Make,
    pack_awq: Make,
    gptq_packing: ModuleType,
    tmp_path: Path,
    method: str,
    group: int,
) -> None:
    folder = make_model("Llama", hidden_size=128, intermediate_size=192)
    tensors = load_file(folder / "model.safetensors")
    settings = {"quant_method": method, "bits": 4, "group_size": group}
    for name in [name for name in tensors if "proj.weight" in name]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        if method == "awq":
            packed = pack_awq(weight, group)
        else:
            packed = gptq_packing.pack_gptq(weight, group, sym=True, zero_offset=1)
        tensors |= {f"{module}.{kind}": part for kind, part in asdict(packed).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    expected = logits_of_ranks(tmp_path, 1)
    # Activations are rounded in groups of their own on each rank.
    distance = (logits_of_ranks(tmp_path, 2) - expected).norm() / expected.norm()
    assert distance < 0.05
    if group == -1:
        return
    with pytest.raises(
        ModelError, match=r"on each of 4 ranks, .*layers\.0\.mlp\.down_proj: 48 inputs .* of 32"
    ):
        check_division(ModelConfig.read(tmp_path), 4)


def test_ranks_on_one_host_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    monkeypatch.setattr(kv_cache, "available_memory", lambda: 16 * gib)
    shape = KVCacheShape(2, 16, 1, 16, torch.float32)
    assert cpu_budget(EngineConfig(model="m"), shape, 64) == 4 * gib
    assert cpu_budget(EngineConfig(model="m", tensor_parallel_size=4), shape, 64) == gib
    given = EngineConfig(model="m", tensor_parallel_size=4, kv_cache_memory=3 * gib)
    assert cpu_budget(given, shape, 64) == 3 * gib  # of each
    assert swap_pool_size(EngineConfig(model="m", swap_space=5.0), shape, CPU) > 0
    with pytest.raises(ModelError, match=r"need 5.0 GiB, but 4.0 GiB are free"):
        swap_pool_size(EngineConfig(model="m", swap_space=5.0, tensor_parallel_size=4), shape, CPU)


def test_the_rank_with_least_memory_sizes_all_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    class Divided(ParallelDecoder):
        def __init__(self) -> None:
            pass

        @property
        def device(self) -> torch.device:
            return torch.device("cuda", 0)

        def measured(self, measure: Callable[[], Any]) -> tuple[Any, list[list[int]]]:
            return measure(), [[900, 5000], [1100, 3000]]

    monkeypatch.setattr(runner, "cuda_budget", lambda *_: 1000)
    monkeypatch.setattr(runner, "free_memory", lambda _: 4000)
    config = EngineConfig(model="m", tensor_parallel_size=3)
    shape = KVCacheShape(2, 16, 1, 16, torch.float32)
    assert runner._budget(config, Divided(), shape, 64) == (900, 3000)
