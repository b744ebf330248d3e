"""Adapters: several in one batch compute what each would as part of the model's own weights."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from inferq.kernels.reference import ReferenceAttention
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest, ResumedOutput
from inferq.worker.model.architecture.transformer import Decoder
from inferq.worker.model.running.cuda_graphs import UnrecordedGraphs
from inferq.worker.model.running.runner import DecoderRunner, load_runner

Make = Callable[..., Any]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "num_key_value_heads": 4}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}
#: Family, its settings, and what two adapters of it target.
FAMILIES = [
    ("Llama", {}, [ATTENTION + MLP, ("v_proj",)]),
    ("Llama", {"attention_bias": True, "mlp_bias": True}, [("q_proj", "v_proj"), ("up_proj",)]),
    ("Qwen2", {}, [("k_proj", "o_proj"), MLP]),
    ("Phi3", {"pad_token_id": 0}, [("qkv_proj", "down_proj"), ("gate_up_proj", "o_proj")]),
    ("GPT2", GPT2, [("c_attn", "c_proj"), ("mlp.c_fc",)]),
    ("OPT", OPT, [("q_proj", "out_proj", "fc1"), ("fc2", "v_proj")]),
    ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, [ATTENTION, MLP]),
]


def merge(model: Path, adapter: Path, folder: Path) -> Path:
    """Write the model with the adapter in its weights: W + scaling · B · A."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scaling = config["lora_alpha"] / (rank**0.5 if config["use_rslora"] else rank)
    tensors = load_file(adapter / "adapter_model.safetensors")
    merged = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, a in tensors.items():
            if not name.endswith(".lora_A.weight"):
                continue
            delta = scaling * tensors[name.replace("lora_A", "lora_B")] @ a
            weight = merged.get_submodule(name[len("base_model.model.") : -len(".lora_A.weight")])
            is_transposed = type(weight).__name__ == "Conv1D"
            weight.weight += delta.T if is_transposed else delta
    merged.save_pretrained(folder)
    return folder


@pytest.fixture(params=["native", "stacked"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for the CPU if it is there, or the products that a GPU computes."""
    if request.param == "stacked":
        monkeypatch.setattr("inferq.worker.model.architecture.lora.pack_lora", lambda *_: None)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(("family", "settings", "targets"), FAMILIES)
def test_rows_of_several_adapters_have_the_logits_of_merged_weights(
    make_model: Make,
    write_adapter: Make,
    reference_logits: Make,
    random_text: Make,
    driver_of: Make,
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    targets: list[tuple[str, ...]],
) -> None:
    model = make_model(family, **settings)
    first = write_adapter(tmp_path / "a", model, targets[0], rank=4, seed=1, lora_alpha=6)
    second = write_adapter(tmp_path / "b", model, targets[1], rank=3, seed=2, use_rslora=True)
    driver = driver_of(model, lora_adapters={"a": str(first), "b": str(second)})
    texts = [random_text(length, length) for length in (9, 14, 11, 7)]
    found = driver.logits_in_chunks(
        texts, [[4, 2], [1, 6, 5], [11], [2, 2]], adapters=("a", "", "b", "a")
    )
    plain = driver.logits_in_chunks(texts[:1], [[9]])[0]
    merged = {
        "": model,
        "a": merge(model, first, tmp_path / "merged-a"),
        "b": merge(model, second, tmp_path / "merged-b"),
    }
    for text, name, logits in zip(texts, ("a", "", "b", "a"), found, strict=True):
        expected = reference_logits(merged[name], text)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert (plain - found[0]).abs().max() > 0.1, "the adapter changes what is computed"


def test_adapters_stay_exact_beside_int8_weights(
    make_model: Make,
    write_adapter: Make,
    random_text: Make,
    driver_of: Make,
    tmp_path: Path,
) -> None:
    model = make_model()
    adapters = {"a": str(write_adapter(tmp_path / "a", model, ATTENTION + MLP, rank=4, seed=1))}
    text = random_text(12, 0)

    def logits(adapter: str, **options: Any) -> torch.Tensor:
        driver = driver_of(model, lora_adapters=adapters, **options)
        found: torch.Tensor = driver.logits_in_chunks([text], [[12]], adapters=(adapter,))[0]
        return found

    plain, adapted = logits(""), logits("a")
    rounded = logits("a", quantization="int8")
    assert (rounded - adapted).norm() < 0.2 * (adapted - plain).norm()


@pytest.fixture(scope="module")
def adapted_model(
    make_model: Make, write_adapter: Make, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A model and the folders of two adapters of it."""
    model = make_model()
    folder = tmp_path_factory.mktemp("adapters")
    return model, {
        "a": str(write_adapter(folder / "a", model, ATTENTION + MLP, rank=4, seed=1)),
        "b": str(write_adapter(folder / "b", model, ("q_proj", "v_proj"), rank=8, seed=2)),
    }


@pytest.fixture
def engine_of(engine_over: Make) -> Make:
    def make(
        model: Path, *, graphs: bool = False, disturbed: int | None = None, **options: Any
    ) -> Engine:
        options = {"num_kv_blocks": 60, "max_model_len": 96, "block_size": 4, **options}
        config = EngineConfig(model=str(model), device="cpu", **options)
        runner = with_graphs(load_runner(config), config) if graphs else None
        rng = None if disturbed is None else random.Random(disturbed)
        engine: Engine = engine_over(config, runner, rng)
        return engine

    return make


def with_graphs(runner: DecoderRunner, config: EngineConfig) -> DecoderRunner:
    assert isinstance(runner._decoder, Decoder)
    runner._decoder._attention = ReferenceAttention()
    return DecoderRunner(
        runner._decoder,
        runner._kv_cache,
        torch.zeros(runner.num_swap_blocks, *runner._kv_cache.shape[1:]),
        config,
        folder=runner.folder,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        launches_ahead=runner.launches_ahead,
        graphs=UnrecordedGraphs(),
    )


def request(name: str, prompt: list[int], adapter: str, **options: Any) -> EngineRequest:
    params = {"temperature": 0.0, "seed": 0, "max_tokens": 12, "ignore_eos": True, **options}
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        adapter=adapter,
    )


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"async_scheduling": True},
        {"graphs": True},
        {"graphs": True, "async_scheduling": True},
        {"disturbed": 3, "num_swap_blocks": 40, "max_num_batched_tokens": 16},
        {"graphs": True, "disturbed": 4, "num_swap_blocks": 40, "max_num_seqs": 8},
    ],
    ids=["plain", "two ranks", "ahead", "graphs", "graphs-ahead", "disturbed", "graphs-disturbed"],
)
def test_two_adapters_and_the_base_in_one_batch_equal_each_alone_and_merged_weights(
    adapted_model: tuple[Path, dict[str, str]],
    random_text: Make,
    engine_of: Make,
    run_history: Make,
    tmp_path: Path,
    options: dict[str, Any],
) -> None:
    model, adapters = adapted_model
    options = {"max_num_seqs": 12, **options}
    names = ("", "a", "b", "b", "", "a")
    requests = [
        request(str(i), random_text(5 + 3 * i, i), name, n=1 + i // 5, temperature=float(i == 5))
        for i, name in enumerate(names)
    ]
    together = run_history(engine_of(model, lora_adapters=adapters, **options), requests)
    engine = engine_of(model, lora_adapters=adapters)
    merged = {
        name: engine_of(merge(model, Path(folder), tmp_path / name))
        for name, folder in adapters.items()
    }
    merged[""] = engine_of(model)
    for each in requests:
        alone = run_history(engine, [each])
        assert {key: together[key] for key in alone} == alone
        plain = request(each.request_id, list(each.prompt_token_ids), "", n=each.params.n,
                        temperature=each.params.temperature)  # fmt: skip
        assert run_history(merged[each.adapter], [plain]) == alone


def test_a_prefix_computed_with_one_adapter_serves_no_other(
    adapted_model: tuple[Path, dict[str, str]], random_text: Make, engine_of: Make
) -> None:
    model, adapters = adapted_model
    engine = engine_of(model, lora_adapters=adapters)
    prompt = random_text(21, 5)
    tokens, hits = [], []
    for number, adapter in enumerate(("", "a", "b", "", "a", "b")):
        engine.add_request(request(str(number), prompt, adapter))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        hits.append(outputs[0].num_cached_tokens)
        tokens.append([token for output in outputs for token in output.token_ids])
    assert hits == [0, 0, 0, 20, 20, 20]
    assert tokens[:3] == tokens[3:]
    assert tokens[0] != tokens[1] != tokens[2] != tokens[0]


def test_a_request_that_is_taken_over_goes_on_with_its_adapter(
    adapted_model: tuple[Path, dict[str, str]],
    random_text: Make,
    engine_of: Make,
    run_history: Make,
) -> None:
    model, adapters = adapted_model
    first = request("r", random_text(9, 1), "b", n=2, temperature=1.0)
    whole = run_history(engine_of(model, lora_adapters=adapters), [first])
    resumed = tuple(ResumedOutput(tuple(whole["r", index][:5])) for index in range(2))
    again = dataclasses.replace(first, resumed=resumed)
    # Of another order: another number stands for the same adapter.
    other = dict(reversed(adapters.items()))
    rest = run_history(engine_of(model, lora_adapters=other), [again])
    assert rest == {("r", index): whole["r", index][5:] for index in range(2)}


def test_an_adapter_that_is_not_loaded_is_refused_with_those_that_are(
    adapted_model: tuple[Path, dict[str, str]], engine_of: Make
) -> None:
    model, adapters = adapted_model
    engine = engine_of(model, lora_adapters=adapters)
    with pytest.raises(InvalidRequestError, match="'c' is not loaded; a, b is"):
        engine.add_request(request("r", [3, 4], "c"))
    with pytest.raises(InvalidRequestError, match="'a' is not loaded; no adapter is"):
        engine_of(model).add_request(request("r", [3, 4], "a"))
