"""Streamed text to content and calls: the same however the text is cut, and nothing lost."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferq.producer.gateway.tools.offered_tools import Part, ToolDelta, ToolPlan, assemble

HERMES = ToolPlan.from_note({"mode": "auto", "format": "hermes"})
JSON = ToolPlan.from_note({"mode": "auto", "format": "json"})
CALLS_ONLY = ToolPlan.from_note({"mode": "required", "format": "hermes"})
BARE_CALLS_ONLY = ToolPlan.from_note({"mode": "required", "format": "json"})
NAMED = ToolPlan.from_note({"mode": "named", "name": "weather"})
PLANS = {"hermes": HERMES, "json": JSON, "named": NAMED, "text": ToolPlan()}

JOB = "job-1"


def hermes(name: str, arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def bare(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def read(plan: ToolPlan, pieces: list[str], reason: str = "stop") -> tuple[list[Part], str]:
    parser = plan.parser(JOB, 0)
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish(is_cut=reason == "length")
    return parts, parser.finish_reason(reason)


def message(plan: ToolPlan, text: str) -> tuple[str | None, list[tuple[str, Any]]]:
    """Content, and the calls with their arguments parsed."""
    content, calls = assemble(read(plan, [text])[0])
    return content, [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in calls or []
    ]


def merged(parts: list[Part]) -> list[Any]:
    """Parts with neighbours of one kind put together: what does not depend on the cuts."""
    joined: list[Any] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, ToolDelta) and isinstance(last, tuple) and part.name is None:
            joined[-1] = (*last[:3], last[3] + part.arguments)
        elif isinstance(part, ToolDelta):
            joined.append((part.index, part.id, part.name, part.arguments))
        else:
            joined.append(part)
    return joined


_leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
_values = st.recursive(
    _leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_arguments = st.dictionaries(st.text(max_size=4), _values, max_size=3)
_names = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
#: Pieces that the parsers look for, whole and broken, so that mistakes are met.
_shards = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<tool", "\n", " ", ";", "{", "}", '"', "\\", "]", "é"),
        *('"name": "f"', '{"name": "f", "arguments": ', '{"name": "f", "parameters": {', "[1, 2"),
    ]
)
_texts = st.lists(
    _shards
    | st.text(max_size=5)
    | st.builds(hermes, _names, _arguments)
    | st.builds(bare, _names, _arguments),
    max_size=8,
).map("".join)


def _cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(ends)]


@given(plan=st.sampled_from(sorted(PLANS)), text=_texts, places=st.lists(st.integers(0, 400)))
def test_any_cut_of_a_text_gives_the_same(plan: str, text: str, places: list[int]) -> None:
    whole, reason = read(PLANS[plan], [text])
    cut, cut_reason = read(PLANS[plan], _cut(text, places))
    single, _ = read(PLANS[plan], list(text))
    assert merged(cut) == merged(whole) == merged(single)
    assert cut_reason == reason


@given(plan=st.sampled_from(sorted(PLANS)), text=_texts, k=st.integers(0, 200))
def test_what_was_yielded_depends_on_the_text_so_far_only(plan: str, text: str, k: int) -> None:
    parser, other = PLANS[plan].parser(JOB, 0), PLANS[plan].parser(JOB, 0)
    by_one = [part for character in text[:k] for part in parser.feed(character)]
    assert merged(by_one) == merged(other.feed(text[:k]))


@given(text=_texts)
def test_nothing_but_mark_up_is_lost(text: str) -> None:
    for plan in (HERMES, JSON):
        parts = merged(read(plan, [text])[0])
        content = "".join(part for part in parts if isinstance(part, str))
        if all(isinstance(part, str) for part in parts):
            assert content == text
        rest = iter(text)  # what was yielded is a subsequence of the text
        raw = "".join(p if isinstance(p, str) else p[2] + p[3] for p in parts)
        if "\\" not in text:  # arguments in an unusual order are written anew
            assert all(character in rest for character in raw.replace(" ", "")), (raw, text)


@given(plan=st.sampled_from(["hermes", "json"]), text=_texts, places=st.lists(st.integers(0, 400)))
def test_of_a_cut_text_only_the_mark_up_of_an_unfinished_call_is_lost(
    plan: str, text: str, places: list[int]
) -> None:
    whole, _ = read(PLANS[plan], [text])
    cut, _ = read(PLANS[plan], _cut(text, places), "length")
    assert merged(cut) == merged(read(PLANS[plan], list(text), "length")[0])
    content, kept = ("".join(p for p in parts if isinstance(p, str)) for parts in (whole, cut))
    assert content.startswith(kept)
    lost = content[len(kept) :].strip(" \n;")
    assert "<tool_call>".startswith(lost[:11]) or lost.startswith("{")
    assert "<tool_call>" not in lost[1:]


@pytest.mark.parametrize(
    ("plan", "text", "content", "calls"),
    [
        (HERMES, hermes("f", {}) + '\n<tool_call>\n{"name": "get_', None, ["f{}"]),
        (HERMES, hermes("f", {}) + '\n<tool_call>\n{"name": "g", "argu', None, ["f{}", "g"]),
        (HERMES, hermes("f", {}) + "\n<tool_", None, ["f{}"]),
        (HERMES, "Hm.\n<tool_call>", "Hm.", []),
        (HERMES, '<tool_call>{"name": "f"', None, ["f"]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1', None, ['f{"a": [1']),
        (HERMES, hermes("f", {})[:-4], None, ["f{}"]),
        (HERMES, "a <tool", "a <tool", []),
        (HERMES, "<tool_call> no call", "<tool_call> no call", []),
        (CALLS_ONLY, "<tool", "", []),
        (JSON, bare("f", {}) + '; {"na', None, ["f{}"]),
        (JSON, bare("f", {}) + '; {"name": "g", "p', None, ["f{}", "g"]),
        (JSON, '{"name": "Ann', '{"name": "Ann', []),
        (BARE_CALLS_ONLY, ' {"name": "g', "", []),
        (BARE_CALLS_ONLY, '{"name": "g", ', None, ["g"]),
    ],
)
def test_a_call_cut_at_the_limit_is_no_content(
    plan: ToolPlan, text: str, content: str | None, calls: list[str]
) -> None:
    parts, reason = read(plan, [text], "length")
    found, made = assemble(parts)
    functions = [call["function"] for call in made or []]
    assert (found, [each["name"] + each["arguments"] for each in functions]) == (content, calls)
    assert reason == "length"


@given(
    st.lists(st.tuples(_names, _arguments), min_size=1, max_size=4), st.text("ab \n{", max_size=9)
)
def test_calls_among_text_are_found_whole(calls: list[tuple[str, Any]], text: str) -> None:
    written = text + "\n".join(hermes(name, arguments) for name, arguments in calls)
    content, found = message(HERMES, written)
    assert found == calls
    assert (content or "") == text.rstrip(" \n")


@given(st.lists(st.tuples(_names, _arguments), min_size=1, max_size=3))
def test_bare_calls_are_found_whole(calls: list[tuple[str, Any]]) -> None:
    written = "; ".join(bare(name, arguments) for name, arguments in calls)
    assert message(JSON, written) == (None, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", []),
        ("", "", []),
        (" \n", " \n", []),
        ("a <tool", "a <tool", []),
        ("a <b> <tool_cart>", "a <b> <tool_cart>", []),
        ("Wait.\n\n" + hermes("f", {}) + "\n", "Wait.", [("f", {})]),
        (hermes("f", {"a": "</tool_call>"}), None, [("f", {"a": "</tool_call>"})]),
        (hermes("f", {}) + "\nDone.", "\nDone.", [("f", {})]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, [("f", {})]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [("f", {})]),
        ("<tool_call>\nnot JSON\n</tool_call> x", "<tool_call>\nnot JSON\n</tool_call> x", []),
        ('a\n<tool_call>{"name": 3}</tool_call>', 'a\n<tool_call>{"name": 3}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": {}}', None, [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}', None, [("f", {})]),
        ('<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
        ('<tool_call>{"name": "f", "arguments": {}, "id": 1}', ', "id": 1}', [("f", {})]),
    ],
)
def test_hermes_text(text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    assert message(HERMES, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello", "hello", []),
        (' {"a": 1}', ' {"a": 1}', []),
        ('{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
        ("\n" + bare("f", {"a": [1]}) + "\n", None, [("f", {"a": [1]})]),
        ('{"type": "function", "name": "f", "arguments": {}}', None, [("f", {})]),
        (bare("f", {}) + ";" + bare("g", {}) + ";", None, [("f", {}), ("g", {})]),
        (bare("f", {}) + " and so on", " and so on", [("f", {})]),
        ("See: " + bare("f", {}), "See: " + bare("f", {}), []),
        (bare("f", {}) + " ; ;" + bare("g", {}), " ; ;" + bare("g", {}), [("f", {})]),
        ('{"name": "f", "parameters": {} ] x', " ] x", [("f", {})]),
    ],
)
def test_text_with_bare_calls(text: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    assert message(JSON, text) == (content, calls)


def test_json_that_is_no_call_is_streamed_as_soon_as_that_is_certain() -> None:
    parser = JSON.parser(JOB, 0)
    assert parser.feed('{"na') == []
    assert parser.feed("tion") == ['{"nation']
    assert parser.feed('": 1}') == ['": 1}']


def test_arguments_come_in_pieces_after_the_name() -> None:
    parser = HERMES.parser(JOB, 0)
    assert parser.feed('<tool_call>\n{"name": "weather", "arguments": ') == []
    (begun,) = parser.feed('{"city": "Pa')
    assert isinstance(begun, ToolDelta)
    assert begun.to_json() == {
        "index": 0,
        "id": begun.id,
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Pa'},
    }
    (more,) = parser.feed("r")
    assert isinstance(more, ToolDelta)
    assert more.to_json() == {"index": 0, "function": {"arguments": "r"}}
    assert parser.feed('is"}') == [ToolDelta(0, 'is"}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.finish() == []


def test_ids_are_the_same_for_whoever_reads_and_differ_by_call_output_and_job() -> None:
    text = hermes("f", {}) + hermes("f", {})
    ids = [
        part.id
        for job in ("job-1", "job-2")
        for output in (0, 1)
        for part in HERMES.parser(job, output).feed(text)
        if isinstance(part, ToolDelta) and part.id
    ]
    assert len(set(ids)) == len(ids) == 8
    again = [part.id for part in HERMES.parser("job-1", 0).feed(text) if part.id]  # type: ignore[union-attr]
    assert again == ids[:2]
    assert all(identity.startswith("call_") for identity in ids)


@pytest.mark.parametrize(
    ("plan", "text", "reason", "finish_reason"),
    [
        (HERMES, hermes("f", {}), "stop", "tool_calls"),
        (HERMES, hermes("f", {}), "length", "length"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a', "stop", "stop"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": 1}', "stop", "tool_calls"),
        (HERMES, "hello", "stop", "stop"),
        (JSON, bare("f", {}), "stop", "tool_calls"),
        (NAMED, '{"a": 1}', "stop", "stop"),
        (NAMED, '{"a": 1', "length", "length"),
    ],
)
def test_the_finish_reason(plan: ToolPlan, text: str, reason: str, finish_reason: str) -> None:
    assert read(plan, [text], reason)[1] == finish_reason


def test_a_named_function_takes_all_text_as_arguments() -> None:
    parts, _ = read(NAMED, ['{"city"', ': "Paris"}'])
    content, calls = assemble(parts)
    assert content is None
    assert calls is not None
    assert calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert assemble(read(NAMED, [""])[0]) == ("", None)


@pytest.mark.parametrize("plan", [HERMES, JSON], ids=["hermes", "json"])
@pytest.mark.parametrize(
    "begin",
    ["", "{", "<tool_call>", '{"name":', "<tool_call>{", bare("f", {})[:-1], hermes("f", {})],
)
def test_white_space_without_end_costs_little(plan: ToolPlan, begin: str) -> None:
    parser = plan.parser(JOB, 0)
    before = time.process_time()
    parts = [part for piece in (begin, *[" \n"] * 10_000) for part in parser.feed(piece)]
    parts += parser.finish()
    assert time.process_time() - before < 2.0
    whole, _ = read(plan, [begin + " \n" * 10_000])
    assert merged(parts) == merged(whole)
