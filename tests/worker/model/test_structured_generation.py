"""Structured output of the small real model: every text has its form, however it came about."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferq.worker.engine.requests.sequence import Sequence
from inferq.worker.engine.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["happy", "sad", None]},
        "pets": {
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "kind": {"enum": ["cat", "dog"]},
                    "weight": {"type": "integer", "minimum": 0, "maximum": 99},
                    "born": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$"},
                },
                "required": ["kind", "weight"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "age", "mood", "pets"],
    "additionalProperties": False,
}
PROMPTS = [
    f"Describe {who} as a JSON object:\n"
    for who in (
        "Ada, who has a cat", "my uncle", "a sad clown", "nobody", "the queen", "a 30 year old man",
        "Tom and his dog", "a girl", "an astronaut", "the cook", "Zoë", "李雷", "a pirate", "a dog",
        "someone happy", "the tallest man", "a baby", "two friends", "a judge", "an owl",
    )
]  # fmt: skip
END = "<|im_end|>"


@pytest.fixture(scope="module")
def loop(loop_of: Callable[..., Any], smollm2: Path) -> Any:
    return loop_of(smollm2, max_model_len=1024, num_kv_blocks=400)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


class Writer:
    """Runs prompts to their end."""

    def __init__(self, loop: Any, tokenizer: Tokenizer) -> None:
        self.loop, self.tokenizer = loop, tokenizer
        self.end = tokenizer._fast.token_to_id(END)

    def add(self, prompt: str, **params: Any) -> Sequence:
        params = {"max_tokens": 300, "ignore_eos": False, "temperature": 0.8, **params}
        sequence: Sequence = self.loop.add(self.tokenizer.encode(prompt), **params)
        return sequence

    def text(self, sequence: Sequence) -> str:
        output = sequence.output_token_ids
        assert output[-1] == self.end, "the form is complete, so it ends"
        return self.tokenizer.decode(output[:-1], skip_special_tokens=False)


@pytest.fixture(scope="module")
def writer(loop: Any, tokenizer: Tokenizer) -> Writer:
    return Writer(loop, tokenizer)


def assert_has_form(value: Any, schema: dict[str, Any]) -> None:
    """Check a value against the part of JSON schema that is used here."""
    if "enum" in schema:
        assert value in schema["enum"]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    if (kind := schema.get("type")) is not None:
        assert isinstance(value, kinds[kind])
        assert not isinstance(value, bool)
    if isinstance(value, dict):
        assert set(schema["required"]) <= set(value) <= set(schema["properties"])
        for name, part in value.items():
            assert_has_form(part, schema["properties"][name])
    elif isinstance(value, list):
        assert schema["minItems"] <= len(value) <= schema["maxItems"]
        for part in value:
            assert_has_form(part, schema["items"])
    elif isinstance(value, str):
        assert len(value) <= schema.get("maxLength", len(value))
        assert re.search(schema.get("pattern", ""), value)
    elif isinstance(value, (int, float)):
        assert schema["minimum"] <= value <= schema["maximum"]


def test_a_nested_schema_holds_for_every_prompt_also_when_some_are_computed_again(
    writer: Writer,
) -> None:
    loop = writer.loop
    params = {"structured_outputs": {"json": SCHEMA}}
    undisturbed = [writer.add(p, seed=i, **params) for i, p in enumerate(PROMPTS)]
    loop.run(undisturbed, stop=writer.end)
    texts = [writer.text(sequence) for sequence in undisturbed]
    for text in texts:
        assert_has_form(json.loads(text), SCHEMA)
    assert len(set(texts)) > 15

    again = [writer.add(p, seed=i, **params) for i, p in enumerate(PROMPTS[:3])]
    for count in range(4):
        loop.step(again)
        loop.drop(again[count % 3])
    # Another worker knows the tokens only.
    taken_over = writer.add(PROMPTS[3], seed=3, **params)
    taken_over.token_ids += undisturbed[3].output_token_ids[:9]
    loop.run([*again, taken_over], stop=writer.end)
    for sequence, expected in zip([*again, taken_over], undisturbed[:4], strict=True):
        assert sequence.token_ids == expected.token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_regular_expressions_choices_and_grammars_hold(writer: Writer, temperature: float) -> None:
    forms: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[A-Z][a-z]{2,9} is \d{1,3} years old\."}, r"[A-Z][a-z]{2,9} is \d{1,3} .*\."),
        ({"choice": ["positive", "negative", "no opinion"]}, "positive|negative|no opinion"),
        (
            {"grammar": 'start: sum\nsum: number ("+" number){1,4}\nnumber: /[0-9]{1,3}/'},
            r"[0-9]{1,3}(\+[0-9]{1,3}){1,4}",
        ),
    ]
    sequences = [
        writer.add("Answer briefly. The film was wonderful: ", structured_outputs=form,
                   temperature=temperature, top_p=0.9)
        for form, _ in forms
    ]  # fmt: skip
    free = writer.add("Once upon a time", max_tokens=20, temperature=0, ignore_eos=True)
    writer.loop.run([*sequences, free], stop=writer.end)
    for sequence, (_, pattern) in zip(sequences, forms, strict=True):
        assert re.fullmatch(pattern, writer.text(sequence))
    alone = writer.add("Once upon a time", max_tokens=20, temperature=0, ignore_eos=True)
    writer.loop.run([alone])
    assert alone.token_ids == free.token_ids


def test_outputs_of_one_prompt_share_their_first_mask(writer: Writer) -> None:
    loop = writer.loop
    params = {"n": 3, "structured_outputs": {"regex": "(yes|no|maybe)!"}, "temperature": 2.0}
    alone = []
    for index in range(3):
        sequence = writer.add("Is it so?", **params)
        sequence.child_index = index
        loop.run([sequence], stop=writer.end)
        alone.append(writer.text(sequence))
    parent = writer.add("Is it so?", **params)
    (first,) = loop.step([parent], children=(0, 1, 2))
    children = [parent, *(loop.fork(parent, index) for index in (1, 2))]
    for child, sample in zip(children, first.samples, strict=True):
        child.token_ids.append(sample.token_id)
    for child in children[1:]:
        loop.copy_on_write(child)
    loop.run(children, stop=writer.end)
    assert [writer.text(child) for child in children] == alone


def test_bad_words_are_spelled_by_the_models_tokenizer(writer: Writer) -> None:
    prompt = "The capital of France is"
    free = writer.add(prompt, temperature=0, max_tokens=6)
    writer.loop.run([free])
    assert "Paris" in writer.tokenizer.decode(free.output_token_ids)
    held = writer.add(prompt, temperature=0, max_tokens=6, bad_words=["Paris", "located in"])
    writer.loop.run([held])
    text = writer.tokenizer.decode(held.output_token_ids)
    assert "Paris" not in text
    assert "located in" not in text
