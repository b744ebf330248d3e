"""Section: transformers' continuous batching beside our engine, with the same weights."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import torch

from gpu.random_model import (
    QWEN3_06B,
    GivenWeights,
    engine_of,
    random_prompt,
    request,
    run_to_end,
    shape,
)
from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each

#: Decoded greedily, token for token, in float32.
_CHECKED_LENS, _CHECKED_TOKENS = (5, 40, 130), 16
_PEER_MEMORY = 0.4


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: the same tokens in float32, then the speed in 16 bits."""
    yield each("tokens in float32", lambda: _same_tokens(settings))
    yield Case("64 requests", lambda: _side_by_side(settings))


def _model(config: dict[str, Any], dtype: torch.dtype, settings: Settings) -> Any:
    """Make transformers' model with its own random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {k: v for k, v in config.items() if k not in ("architectures", "dtype")}
    model_config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device(settings.device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, dtype=dtype, attn_implementation="sdpa"
        )
    return model.eval()


def _same_tokens(settings: Settings) -> Record:
    config = dict(shape(QWEN3_06B, settings, num_hidden_layers=4))
    lens = (5, 9) if settings.smoke else _CHECKED_LENS
    count = 4 if settings.smoke else _CHECKED_TOKENS
    rng = random.Random(0)
    prompts = [random_prompt(rng, length, config["vocab_size"]) for length in lens]
    # Its modules update tensors in threads of their own, which inference tensors forbid.
    with torch.inference_mode(False), torch.no_grad():
        model = _model(config, torch.float32, settings)
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=settings.device)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            expected.append(out[0, len(prompt) :].tolist())
        state = model.state_dict()
    with engine_of(
        config, GivenWeights(state), settings, dtype="float32", num_kv_blocks=64, max_model_len=512
    ) as loaded:
        for index, prompt in enumerate(prompts):
            loaded.engine.add_request(request(str(index), prompt, count, temperature=0.0))
        found = run_to_end(loaded.engine, settings)
    same = sum(found.get(str(index)) == tokens for index, tokens in enumerate(expected))
    return Record(
        "tokens in float32",
        {"same": Quantity(same), "requests": Quantity(len(prompts))},
        Target("same", at_least=len(prompts)),
    )


def _side_by_side(settings: Settings) -> Iterator[Record]:
    config = dict(shape(QWEN3_06B, settings))
    requests, tokens = (3, 4) if settings.smoke else (64, 128)
    lens = (3, 9) if settings.smoke else (100, 512)
    rng = random.Random(0)
    prompts = [
        random_prompt(rng, rng.randint(*lens), config["vocab_size"]) for _ in range(requests)
    ]
    with torch.inference_mode(False), torch.no_grad():
        model = _model(config, settings.dtype, settings)
        state = model.state_dict()
    ours = _ours(config, state, prompts, tokens, settings)
    yield ours
    if settings.smoke and find_spec("psutil") is None:
        yield Record("transformers' continuous batching", note="needs psutil on the CPU")
        return
    with torch.inference_mode(False), torch.no_grad():
        theirs = _theirs(model, prompts, tokens, settings)
    yield theirs
    mine, other = (record.quantities["throughput"].value for record in (ours, theirs))
    assert isinstance(mine, float)
    assert isinstance(other, float)
    yield Record("ours over transformers'", {"ratio": Quantity(mine / other)})


def _ours(
    config: dict[str, Any],
    state: dict[str, torch.Tensor],
    prompts: list[list[int]],
    tokens: int,
    settings: Settings,
) -> Record:
    with engine_of(
        config,
        GivenWeights(state),
        settings,
        max_model_len=1024,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=8192,
        num_kv_blocks=len(prompts) * 64,
    ) as loaded:
        engine = loaded.engine
        engine.add_request(request("warm", prompts[0], 4, temperature=0.0))
        run_to_end(engine, settings)
        engine.reset_prefix_cache()
        for index, prompt in enumerate(prompts):
            engine.add_request(request(str(index), prompt, tokens, temperature=0.0))
        start = time.perf_counter()
        found = run_to_end(engine, settings)
        seconds = time.perf_counter() - start
    count = sum(map(len, found.values()))
    return Record("ours", _figures(count, seconds), note=_incomplete(count, prompts, tokens))


def _theirs(model: Any, prompts: list[list[int]], tokens: int, settings: Settings) -> Record:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options: dict[str, Any] = {"max_memory_percent": _PEER_MEMORY}
    if settings.smoke:
        options = {"num_blocks": 32, "max_batch_tokens": 64, "use_cuda_graph": False}
    batching = ContinuousBatchingConfig(**options)
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.warmup()
    manager.start()
    _collect(manager, manager.add_requests([prompts[0]], max_new_tokens=4), settings)
    start = time.perf_counter()
    count = _collect(manager, manager.add_requests(prompts, max_new_tokens=tokens), settings)
    seconds = time.perf_counter() - start
    manager.stop(block=True, timeout=5)
    note = _incomplete(count, prompts, tokens)
    return Record("transformers' continuous batching", _figures(count, seconds), note=note)


def _collect(manager: Any, names: list[str], settings: Settings) -> int:
    """Wait for the requests, or the end of the time; return the tokens of those that ended."""
    open_names, count = set(names), 0
    while open_names and settings.seconds_left > 0:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its thread has ended")
            continue
        if result.error:
            raise RuntimeError(result.error)
        if result.is_finished():
            open_names.discard(result.request_id)
            count += len(result.generated_tokens)
    return count


def _figures(count: int, seconds: float) -> dict[str, Quantity]:
    return {
        "throughput": Quantity(count / seconds, "output tokens/s"),
        "seconds": Quantity(seconds, "s"),
        "tokens": Quantity(count),
    }


def _incomplete(count: int, prompts: list[list[int]], tokens: int) -> str:
    wanted = len(prompts) * tokens
    return "" if count == wanted else f"stopped: the time was up after {count} of {wanted} tokens"
