"""What a reader sees of an output: final text, cut at stop strings, whole characters."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferq.protocol.params import SamplingParams
from inferq.worker.engine.text.output import OutputText, TextStep

ALPHABET = "Here is the English alphabet: ABC"


def _params(**options) -> SamplingParams:
    return SamplingParams(max_tokens=None, **options)


def _one_by_one(output: OutputText, ids: list[int]) -> list[TextStep]:
    steps = []
    for token_id in ids:
        steps.append(output.append([token_id]))
        if output.stop is not None:
            break
    return steps


def _shown(steps: list[TextStep]) -> str:
    return "".join(piece for step in steps for piece in step.text_pieces)


@pytest.mark.parametrize(
    "pieces", [("D", "E", "F", "G", "H", "I", "J"), ("DEF", "GHI", "JKL"), ("DEFGHIJKLM",)]
)
def test_a_stop_string_never_leaks_while_streaming(make_tokenizer, spell, pieces):
    tokenizer = make_tokenizer("DEF", "GHI", "JKL", "DEFGHIJKLM")
    output = OutputText(tokenizer, _params(stop=["DEFGHIJ"]))
    steps = _one_by_one(output, spell(tokenizer, ALPHABET, *pieces, "K"))
    assert _shown(steps) == ALPHABET
    assert output.stop == "DEFGHIJ"
    assert output.finish() == ""


def test_a_stop_inside_a_token_cuts_the_text_before_it(make_tokenizer, spell):
    tokenizer = make_tokenizer("DEF")
    output = OutputText(tokenizer, _params(stop="DE"))
    step = output.append(spell(tokenizer, "ABC", "DEF"))
    assert "".join(step.text_pieces) == "ABC"
    assert step.stop == "DE"


def test_the_earliest_stop_cuts_the_text(make_tokenizer, spell):
    tokenizer = make_tokenizer(" The user is a")
    output = OutputText(tokenizer, _params(stop=["a", "is", ","]))
    step = output.append(spell(tokenizer, " The user is a"))
    assert (step.text_pieces, step.stop) == ((" The user ",), "is")


def test_tokens_after_the_one_that_completes_the_stop_are_not_accepted(make_tokenizer, spell):
    tokenizer = make_tokenizer("one", "##", "two")
    output = OutputText(tokenizer, _params(stop="###", logprobs=0))
    ids = spell(tokenizer, "one", "##", "##", "two", "two")
    step = output.append(ids)
    assert step == TextStep(("one", "", ""), stop="###")
    assert step.num_accepted == 3
    assert output.append(ids) == TextStep((), stop="###")
    assert output.num_tokens == 3


def test_held_back_text_is_released_at_the_end(make_tokenizer, spell):
    tokenizer = make_tokenizer("Thought: ", "Obs")
    output = OutputText(tokenizer, _params(stop="Observation:"))
    assert _shown([output.append(spell(tokenizer, "Thought: ", "Obs"))]) == "Thought: "
    assert output.finish() == "Obs"
    assert output.finish() == ""
    assert output.stop is None


def test_held_back_text_is_released_when_it_turns_out_to_be_no_stop(make_tokenizer, spell):
    tokenizer = make_tokenizer("Obs", "erver")
    output = OutputText(tokenizer, _params(stop="Observation:"))
    assert output.append(spell(tokenizer, "Obs", "erver")).text_pieces == ("", "Observer")


def test_the_stop_string_stays_in_the_text_if_asked_for(make_tokenizer, spell):
    tokenizer = make_tokenizer("D", "EF")
    params = _params(stop="DE", include_stop_str_in_output=True)
    output = OutputText(tokenizer, params)
    steps = _one_by_one(output, spell(tokenizer, "C", "D", "EF", "G"))
    assert _shown(steps) + output.finish() == "CDE"
    assert output.stop == "DE"


def test_stop_strings_count_only_after_min_tokens(make_tokenizer, spell):
    tokenizer = make_tokenizer("ab")
    output = OutputText(tokenizer, _params(stop="ab", min_tokens=2))
    steps = _one_by_one(output, spell(tokenizer, "ab", "ab", "x", "ab", "ab"))
    assert _shown(steps) == "ababx"
    assert output.num_tokens == 4


def test_a_stop_may_begin_before_min_tokens_and_complete_after(make_tokenizer, spell):
    tokenizer = make_tokenizer()
    output = OutputText(tokenizer, _params(stop="abc", min_tokens=2))
    assert _shown(_one_by_one(output, spell(tokenizer, "abcd"))) == ""
    assert output.stop == "abc"


@pytest.mark.parametrize("text", ["ďábelské", "今天天气如何？", "🫠🇫🇷👩‍👩‍👧"])  # noqa: RUF001
def test_characters_over_several_tokens_are_shown_whole(make_tokenizer, spell, text):
    tokenizer = make_tokenizer()
    output = OutputText(tokenizer, _params())
    pieces = [p for s in _one_by_one(output, spell(tokenizer, text)) for p in s.text_pieces]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + output.finish() == text


def test_a_budget_that_ends_inside_a_character_shows_it_once_at_the_end(make_tokenizer, spell):
    tokenizer = make_tokenizer()
    output = OutputText(tokenizer, _params(stop="!"))
    ids = spell(tokenizer, "Hi 🫠")[:-1]
    assert _shown(_one_by_one(output, ids)) == "Hi "
    assert output.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "Hi \ufffd"


def test_a_stop_string_that_spans_characters_of_several_bytes_is_found(make_tokenizer, spell):
    tokenizer = make_tokenizer()
    output = OutputText(tokenizer, _params(stop="天气"))
    assert _shown(_one_by_one(output, spell(tokenizer, "今天天气如何"))) == "今天"


def test_special_tokens_are_left_out_unless_asked_for(make_tokenizer, spell):
    tokenizer = make_tokenizer()
    ids = [*spell(tokenizer, "a"), tokenizer.bos_token_id, *spell(tokenizer, "b")]
    assert _shown([OutputText(tokenizer, _params()).append(ids)]) == "ab"
    kept = OutputText(tokenizer, _params(skip_special_tokens=False))
    assert _shown([kept.append(ids)]) == "a<s>b"


def test_an_end_token_is_accepted_but_shown_only_if_asked_for(make_tokenizer, spell):
    tokenizer = make_tokenizer("end")
    ids = spell(tokenizer, "a", "end")
    hidden = OutputText(tokenizer, _params())
    assert hidden.append(ids, ends_on_token=True) == TextStep(("a", ""))
    shown = OutputText(tokenizer, _params(include_stop_str_in_output=True))
    assert shown.append(ids, ends_on_token=True) == TextStep(("a", "end"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_state_depends_on_the_tokens_alone_however_they_were_grouped(make_tokenizer, data):
    tokenizer = make_tokenizer("ab", "abc", "é!", "stop")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(256, 259)))
    stops = data.draw(st.lists(st.sampled_from(["abab", "bc", "é", "pst", "a", "\ufffd"])))
    params = _params(
        stop=stops,
        min_tokens=data.draw(st.integers(0, 4)),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    single = OutputText(tokenizer, params)
    pieces = [piece for i in ids for piece in single.append([i]).text_pieces]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    grouped = OutputText(tokenizer, params)
    steps = [grouped.append(ids[a:b]) for a, b in pairwise([0, *cuts, len(ids)])]
    assert [piece for step in steps for piece in step.text_pieces] == pieces
    assert grouped.finish() == single.finish()
    assert (grouped.stop, grouped.num_tokens) == (single.stop, single.num_tokens)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_text_is_the_decode_of_all_tokens_up_to_the_stop(make_tokenizer, data):
    tokenizer = make_tokenizer("ab", "abc", "é!", "stop")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(256, 259)))
    output = OutputText(tokenizer, _params(stop=["bca", "topa", "é"]))
    text = _shown([output.append(ids)]) + output.finish()
    whole = tokenizer.decode(ids[: output.num_tokens])
    assert text == (whole if output.stop is None else whole[: whole.index(output.stop)])
    assert not any(stop in text for stop in ("bca", "topa", "é"))


@pytest.mark.model
def test_the_real_tokenizer_streams_any_text(real_tokenizer):
    text = "Dobrý den! 今天天气如何？ 🫠🇫🇷👩‍👩‍👧\n\tdef f(x):  return x\u00a0+ 1"  # noqa: RUF001
    ids = real_tokenizer.encode(text)
    output = OutputText(real_tokenizer, _params(stop="never"))
    steps = _one_by_one(output, ids)
    assert _shown(steps) + output.finish() == text
    assert "\ufffd" not in _shown(steps)


def test_without_detokenizing_every_token_is_taken_and_has_no_text(make_tokenizer, spell):
    tokenizer = make_tokenizer("DEF")
    output = OutputText(tokenizer, _params(detokenize=False))
    step = output.append(spell(tokenizer, "ABC", "DEF"))
    assert step.text_pieces == ("",) * 4
    assert (step.stop, output.finish()) == (None, "")
