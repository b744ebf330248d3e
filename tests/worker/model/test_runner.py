"""From a folder to a runner, and what a runner does with plans."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferq.protocol.errors import ModelError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest, ResumedOutput
from inferq.worker.model.architecture.serving_limits import served_dtype
from inferq.worker.model.loading.hub import find_model_folder
from inferq.worker.model.running.kv_cache import CPU_MEMORY_CAP, KVCacheShape
from inferq.worker.model.running.runner import DecoderRunner, load_runner
from inferq.worker.model.sizing.memory import available_memory

Make = Callable[..., Any]


def config_of(folder: Path, **options: Any) -> EngineConfig:
    options = {"num_kv_blocks": 64, "device": "cpu", **options}
    return EngineConfig(model=str(folder), **options)


def engine_of(runner: DecoderRunner, config: EngineConfig) -> Engine:
    return Engine(
        config,
        runner,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        vocab_size=runner.vocab_size,
    )


def generate(engine: Engine, prompts: dict[str, list[int]], **params: Any) -> dict[str, list[int]]:
    for request_id, prompt in prompts.items():
        sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 7, **params})
        engine.add_request(
            EngineRequest(request_id=request_id, prompt_token_ids=tuple(prompt), params=sampling)
        )
    tokens: dict[str, list[int]] = {request_id: [] for request_id in prompts}
    while engine.has_work():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    return tokens


def test_greedy_tokens_are_the_argmax_of_transformers(
    make_model: Make, reference_logits: Make, random_text: Make
) -> None:
    folder = make_model()
    config = config_of(folder)
    prompts = {str(n): random_text(n, n) for n in (1, 15, 16, 33)}
    outputs = generate(engine_of(load_runner(config), config), prompts, temperature=0)
    for name, prompt in prompts.items():
        text = [*prompt, *outputs[name]]
        best = reference_logits(folder, text).argmax(dim=1).tolist()
        assert outputs[name] == best[len(prompt) - 1 : -1]


@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.05}], ids=str
)
def test_a_seeded_request_gives_the_same_tokens_alone_in_company_and_preempted(
    make_model: Make, random_text: Make, params: dict[str, Any]
) -> None:
    folder = make_model()
    config = config_of(folder, max_model_len=64)
    runner = load_runner(config)
    prompts = {str(n): random_text(10 + n, n) for n in range(8)}
    alone = {
        n: generate(engine_of(runner, config), {n: p}, **params)[n] for n, p in prompts.items()
    }
    assert generate(engine_of(runner, config), prompts, **params) == alone
    backwards = dict(reversed(prompts.items()))
    assert generate(engine_of(runner, config), backwards, **params) == alone
    tight = config_of(folder, max_model_len=32, num_kv_blocks=5, block_size=8)
    engine = engine_of(load_runner(tight), tight)
    assert generate(engine, prompts, **params) == alone
    assert engine.stats().num_preemptions > 0


def test_resumed_output_goes_on_with_the_same_tokens(make_model: Make, random_text: Make) -> None:
    config = config_of(make_model())
    engine = engine_of(load_runner(config), config)
    prompt = random_text(9, 0)
    whole = generate(engine, {"whole": prompt})["whole"]
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=7)
    engine.add_request(
        EngineRequest(
            request_id="resumed",
            prompt_token_ids=tuple(prompt),
            resumed=(ResumedOutput(tuple(whole[:5])),),
            params=params,
        )
    )
    rest = [token for _ in range(7) for output in engine.step() for token in output.token_ids]
    assert whole == [*whole[:5], *rest]


def test_no_end_token_comes_before_min_tokens(make_model: Make, random_text: Make) -> None:
    config = config_of(make_model())
    engine = engine_of(load_runner(config), config)
    prompt = random_text(9, 0)
    free = generate(engine, {"free": prompt}, temperature=0)["free"]
    params = {"temperature": 0, "stop_token_ids": [free[0]], "min_tokens": 4}
    held = generate(engine, {"held": prompt}, **params)["held"]
    assert free[0] not in held[:4]
    ended = generate(engine, {"ended": prompt}, **{**params, "min_tokens": 0})["ended"]
    assert ended == free[:1]


def test_broken_logits_end_their_own_request_only(make_model: Make, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model(), tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    config = config_of(folder, enable_prefix_caching=False)
    engine = engine_of(load_runner(config), config)
    for name, prompt in {"sound": (6, 7), "broken": (6, 5)}.items():
        params = SamplingParams(max_tokens=1, seed=0)
        engine.add_request(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))
    ended = {output.request_id: output for _ in range(2) for output in engine.step()}
    assert ended["broken"].token_ids == ()
    assert ended["broken"].error is not None
    assert "not finite" in ended["broken"].error.message
    assert len(ended["sound"].token_ids) == 1
    assert ended["sound"].error is None


def test_the_longest_request_follows_the_model_unless_told(make_model: Make) -> None:
    folder = make_model()
    assert load_runner(config_of(folder)).max_model_len == 128
    assert load_runner(config_of(folder, max_model_len=100)).max_model_len == 100
    with pytest.raises(ModelError, match="max_model_len: 129 is more than the model's 128"):
        load_runner(config_of(folder, max_model_len=129))


def test_the_pool_says_what_fits(make_model: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = load_runner(config_of(make_model(), num_kv_blocks=20))
    assert runner.num_blocks == 20
    assert "20 blocks of 16 tokens (240.0 KiB)" in caplog.text
    assert "2.5 requests of max_model_len 128" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_blocks": 7}, "needs 8 KV blocks.*the pool has 7.*at most 112, or raise num_kv_"),
        (
            {"num_kv_blocks": None, "kv_cache_memory": 12288 * 3},
            "the pool has 3 .*at most 48, or raise kv_cache_memory to at least 98304",
        ),
        ({"num_kv_blocks": None, "kv_cache_memory": 1}, "the pool has 0 .*: raise kv_cache_memory"),
    ],
)
def test_a_pool_too_small_for_one_request_is_refused_with_the_numbers(
    make_model: Make, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_runner(config_of(make_model(), **options))


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        (
            {"num_kv_blocks": None, "kv_cache_memory": 10**15},
            "kv_cache_memory",
            r"931322\.6 GiB, but 1\.0 GiB are free: lower kv_cache_memory to at most 1073741824",
        ),
        (
            {"num_kv_blocks": 100_000},
            "num_kv_blocks",
            r"100000 KV blocks need 1\.1 GiB, but 1\.0 GiB are free: .* at most 87381",
        ),
    ],
)
def test_a_pool_larger_than_the_memory_is_refused_with_the_numbers(
    make_model: Make,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    field: str,
    message: str,
) -> None:
    monkeypatch.setattr("inferq.worker.model.sizing.memory.available_memory", lambda: 2**30)
    with pytest.raises(ModelError, match=message) as refused:
        load_runner(config_of(make_model(), **options))
    assert refused.value.field == field


def test_memory_that_cannot_be_had_after_all_is_said() -> None:
    shape = KVCacheShape(1, 16, 1, 64, torch.float32)
    with pytest.raises(ModelError, match=r"num_kv_blocks: \d+ KV blocks need .* cpu does not have"):
        shape.allocate(2**40, torch.device("cpu"))


def test_the_default_pool_leaves_the_machine_usable(make_model: Make) -> None:
    runner = load_runner(config_of(make_model(), num_kv_blocks=None))
    assert runner.num_blocks * 12288 <= min(CPU_MEMORY_CAP, available_memory())


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    1000 kB\n")
    assert available_memory(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 1000 * 1024
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("300000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 50000\n")
    assert available_memory(meminfo, tmp_path) == 250000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_dtypes_run(make_model: Make, random_text: Make, dtype: str) -> None:
    config = config_of(make_model(), dtype=dtype)
    outputs = generate(engine_of(load_runner(config), config), {"a": random_text(9, 0)})
    assert len(outputs["a"]) == 12


@pytest.mark.parametrize(
    ("asked", "stored", "device", "expected"),
    [
        ("auto", "bfloat16", "cuda", torch.bfloat16),
        ("auto", "float16", "cuda", torch.float16),
        ("auto", None, "cuda", torch.float32),
        ("auto", "bfloat16", "cpu", torch.float32),
        ("float16", "bfloat16", "cuda", torch.float16),
        ("bfloat16", "float32", "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_the_cpu_unless_told(
    asked: str, stored: str | None, device: str, expected: torch.dtype
) -> None:
    model = cast("Any", SimpleNamespace(dtype=stored))
    assert served_dtype(asked, model, torch.device(device)) == expected


def test_a_missing_device_is_refused(make_model: Make) -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ModelError, match=f"device: {device} was asked for"):
        load_runner(config_of(make_model(), device=device))


def test_padded_rows_of_the_vocabulary_are_never_sampled(
    make_model: Make, tmp_path: Path, random_text: Make
) -> None:
    folder = Path(shutil.copytree(make_model(), tmp_path / "copy"))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "z": 9}}}')
    config = config_of(folder)
    runner = load_runner(config)
    assert runner.vocab_size == 10
    tokens = generate(engine_of(runner, config), {"a": [3, 4]}, temperature=9, max_tokens=60)["a"]
    assert set(tokens) == set(range(10))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("./no/such", "there is no folder ./no/such"),
        ("nobody/has-this-model", "nobody/has-this-model is neither a local folder nor in the hub"),
        ("no-such-model", "no-such-model is neither a local folder nor in the hub's cache"),
    ],
)
def test_an_unknown_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: str, message: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=re.escape(message)):
        find_model_folder(model)


def test_a_gguf_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"import it first: inferq model import .*x\.gguf"):
        find_model_folder(str(tmp_path / "x.gguf"))
