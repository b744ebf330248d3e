"""What the worker lets a model write under a plan's form always has valid arguments."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inferq.producer.gateway.requests.forms import requested_form
from inferq.producer.gateway.tools.offered_tools import assemble, plan
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.sampling.form_tokens import with_text_tokens
from inferq.worker.engine.sampling.structured_output import check_structured_outputs, parser_limits

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5, "description": "Where"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
#: Properties called like keywords.
ODD = {
    "type": "object",
    "properties": {
        "description": {"type": "boolean"},
        "enum": {"$ref": "#/properties/description"},
        "default": {"type": "null"},
    },
    "required": ["description", "enum", "default"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "begin", "parameters": ODD}},
    {"type": "function", "function": {"name": "clock"}},
]
SCHEMAS: dict[str, Any] = {
    "weather": WEATHER,
    "begin": ODD,
    "clock": {"type": "object", "maxProperties": 0},
}
ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string", "maxLength": 5}},
    "required": ["answer"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def grammar(**asked: Any) -> str:
    form = plan(tools=TOOLS, **asked).form
    assert form is not None
    check_structured_outputs(SamplingParams(structured_outputs=form.outputs))
    assert form.outputs.grammar is not None
    return LLMatcher.grammar_from_lark(form.outputs.grammar)


def walk(tokenizer: LLTokenizer, text: str, source: random.Random, begin: str = "") -> str | None:
    """Write a text as the form allows, byte by byte at random; None if it gets too long."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=parser_limits())
    mask = allocate_token_bitmask(1, tokenizer.vocab_size)
    written = [*begin.encode()]
    assert matcher.consume_tokens(written)
    while len(written) < 600:
        fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        if matcher.is_accepting() and (source.random() < 0.5 or allowed == [tokenizer.eos_token]):
            return bytes(written).decode()
        plain = [b for b in allowed if 32 <= b < 127 or b == 10]
        written.append(source.choice(plain or [b for b in allowed if b < 256]))
        assert matcher.consume_token(written[-1])
    return None


def check(text: str, tool_format: str) -> list[str]:
    """Parse a text that a form allowed; return the names called."""
    planned = plan(
        tools=TOOLS,
        tool_choice="auto",
        parallel_tool_calls=None,
        form=None,
        tool_format=tool_format,
    )
    parser = planned.parser("job", 0)
    content, calls = assemble([*parser.feed(text), *parser.finish()])
    for call in calls or []:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    if calls is None:
        assert content == text
    return [call["function"]["name"] for call in calls or []]


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_required_calls_are_always_there_and_valid(
    tokenizer: LLTokenizer, tool_format: str, is_parallel: bool
) -> None:
    form = grammar(
        tool_choice="required",
        parallel_tool_calls=is_parallel,
        form=None,
        tool_format=tool_format,
    )
    source, seen, most = random.Random(1), Counter[str](), 0
    for _ in range(40):
        text = walk(tokenizer, form, source)
        if text is not None:
            called = check(text, tool_format)
            assert called
            seen.update(called)
            most = max(most, len(called))
    assert set(seen) == set(SCHEMAS)
    assert (most > 1) is (is_parallel and tool_format == "hermes")


@pytest.mark.parametrize(
    ("tool_format", "begin"),
    [("hermes", "Let me see.\n<tool_call>"), ("json", '{"name"'), ("json", '\n{ "name"')],
)
def test_a_call_that_was_begun_is_finished_as_its_schema_says(
    tokenizer: LLTokenizer, tool_format: str, begin: str
) -> None:
    form = grammar(
        tool_choice="auto", parallel_tool_calls=False, form=None, tool_format=tool_format
    )
    source, seen = random.Random(2), Counter[str]()
    for _ in range(30):
        text = walk(tokenizer, form, source, begin)
        if text is not None:
            called = check(text, tool_format)
            assert len(called) == 1
            seen.update(called)
    assert set(seen) == set(SCHEMAS)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("text", ["", "Hello, <b>world</b>!", '{"a": [1]}', " \n", '{"nam": 1}'])
def test_any_other_text_is_allowed_when_calls_are_optional(
    tokenizer: LLTokenizer, tool_format: str, text: str
) -> None:
    form = grammar(tool_choice="auto", parallel_tool_calls=True, form=None, tool_format=tool_format)
    matcher = LLMatcher(tokenizer, form, log_level=0, limits=parser_limits())
    assert matcher.consume_tokens([*text.encode()])
    assert matcher.is_accepting()


def test_text_may_come_between_and_after_calls(tokenizer: LLTokenizer) -> None:
    form = grammar(tool_choice="auto", parallel_tool_calls=True, form=None, tool_format="hermes")
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    matcher = LLMatcher(tokenizer, form, log_level=0, limits=parser_limits())
    assert matcher.consume_tokens([*f"One {call}\ntwo {call} three".encode()])
    assert matcher.is_accepting()


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_with_a_response_format_the_answer_is_a_call_or_json_of_its_schema(
    tokenizer: LLTokenizer, tool_format: str
) -> None:
    form = grammar(
        tool_choice="auto",
        parallel_tool_calls=False,
        form=requested_form({"response_format": RESPONSE_FORMAT}),
        tool_format=tool_format,
    )
    source, kinds = random.Random(3), Counter[bool]()
    for _ in range(40):
        text = walk(tokenizer, form, source)
        if text is not None:
            called = check(text, tool_format)
            if not called:
                jsonschema.validate(json.loads(text), ANSWER)
            kinds[bool(called)] += 1
    assert len(kinds) == 2


def test_a_model_writes_calls_in_its_own_tokens() -> None:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<end>"])
    # As Qwen has them: added to the vocabulary, but not special.
    fast.add_tokens([AddedToken(tag) for tag in ("<tool_call>", "</tool_call>", "<think>")])
    end = fast.token_to_id("<end>")
    tokenizer = LLTokenizer(with_text_tokens(fast.to_str(), {end}), eos_token=[end])
    written = fast.encode('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>').ids
    assert len(written) < 45
    mask = allocate_token_bitmask(1, tokenizer.vocab_size)
    for choice in ("auto", "required"):
        form = grammar(
            tool_choice=choice, parallel_tool_calls=False, form=None, tool_format="hermes"
        )
        matcher = LLMatcher(tokenizer, form, log_level=0, limits=parser_limits())
        for position, token in enumerate([*written, end]):
            fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            assert bits[token]
            # Where text is free, so is thinking.
            assert bits[fast.token_to_id("<think>")] == (choice == "auto" and position == 0)
            assert matcher.consume_token(token)
