"""Which forms are accepted, and which tokens they allow, on a tokenizer made for the purpose."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.protocol.structured import StructuredOutputs
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence, SequenceStatus
from inferq.worker.engine.sampling import structured_output
from inferq.worker.engine.sampling.form_masks import FormMasks, FormMatchers
from inferq.worker.engine.sampling.structured_output import FormCompiler, check_structured_outputs

WORDS = ("yes", "no", "maybe", "{}", '":')


@pytest.fixture(scope="module")
def fast() -> Tokenizer:
    """Every byte is a token, and so are some words; two tokens end an output."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = splitter
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<turn>", "<image>"])
    return made


class Forms:
    """Drives matchers by text."""

    def __init__(self, fast: Tokenizer) -> None:
        self.fast = fast
        self.size = fast.get_vocab_size()
        self.ends = frozenset(self.ids("<end>", "<turn>"))
        self.compiler = FormCompiler(fast.to_str, self.ends)
        self.matchers = FormMatchers(self.compiler, self.size)

    def ids(self, *tokens: str) -> list[int]:
        found = [self.fast.token_to_id(token) for token in tokens]
        assert None not in found
        return found

    def sequence(self, text: str = "", **form: Any) -> Sequence:
        params = SamplingParams(seed=0, structured_outputs=StructuredOutputs(**form))
        request = EngineRequest(request_id="a", prompt_token_ids=(1, 2, 3), params=params)
        sequence = Sequence(request, 16)
        sequence.token_ids += self.fast.encode(text, add_special_tokens=False).ids
        return sequence

    def masks(self, *sequences: Sequence) -> FormMasks:
        return self.matchers.start(sequences).result()

    def allowed(self, sequence: Sequence) -> set[str]:
        masks = self.masks(sequence)
        assert masks.failed == {}
        bits = np.unpackbits(masks.bits[0], bitorder="little")
        return {self.fast.id_to_token(token) for token in np.flatnonzero(bits).tolist()}

    def accepts(self, text: str, **form: Any) -> bool:
        """Whether the whole text has the form: each byte allowed in turn, then the end."""
        sequence = self.sequence(**form)
        for token in self.fast.encode(text, add_special_tokens=False).ids:
            if self.fast.id_to_token(token) not in self.allowed(sequence):
                return False
            sequence.token_ids.append(token)
        return "<end>" in self.allowed(sequence)


@pytest.fixture
def forms(fast: Tokenizer) -> Forms:
    return Forms(fast)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("form", "text", "is_accepted"),
    [
        ({"json": SCHEMA}, '{"name":"x","age":3}', True),
        ({"json": SCHEMA}, '{\n  "name": "x",\n  "age": -31,\n  "tags": ["a", "b"]\n}', True),
        ({"json": SCHEMA}, '{"name":"x"}', False),
        ({"json": SCHEMA}, '{"name":"x","age":"3"}', False),
        ({"json": SCHEMA}, '{"name":"x","age":3,"tags":["c"]}', False),
        ({"json": SCHEMA}, '{"name":"x","age":3,"other":1}', False),
        ({"json": SCHEMA}, '{"name":' + 40 * " " + '"x","age":3}', False),
        ({"json_object": True}, '{"a": [1, {"b": null}], "ü": "\\n"}', True),
        ({"json_object": True}, "[1]", False),
        ({"json_object": True}, '{"a": 1', False),
        ({"regex": r"^\d{3}-[a-f]+$"}, "123-abc", True),
        ({"regex": r"\d{3}-[a-f]+"}, "12-abc", False),
        ({"regex": r"\d{3}-[a-f]+"}, "123-", False),
        ({"choice": ["yes", "no", 'say "hi"\n', "ä/🫠"]}, "yes", True),
        ({"choice": ["yes", "no", 'say "hi"\n', "ä/🫠"]}, 'say "hi"\n', True),
        ({"choice": ["yes", "no", 'say "hi"\n', "ä/🫠"]}, "ä/🫠", True),
        ({"choice": ["yes", "no"]}, "yesno", False),
        ({"choice": ["a.c"]}, "abc", False),
        ({"grammar": 'start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"'}, "1,(2,(3))", True),
        ({"grammar": 'start: item ("," item)*\nitem: /[0-9]+/ | "(" start ")"'}, "1,(2", False),
    ],
)
def test_a_form_allows_exactly_the_texts_that_have_it(
    forms: Forms, form: dict[str, Any], text: str, is_accepted: bool
) -> None:
    assert forms.accepts(text, **form) is is_accepted


def test_the_end_is_allowed_where_the_form_accepts_and_forced_where_it_is_complete(
    forms: Forms,
) -> None:
    regex = {"regex": "(yes|no)(, [a-c]{1,2})?"}
    assert "<end>" not in forms.allowed(forms.sequence("", **regex))
    assert forms.allowed(forms.sequence("yes", **regex)) == {"<end>", "<turn>", ","}
    assert forms.allowed(forms.sequence("no, ab", **regex)) == {"<end>", "<turn>"}


def test_an_end_that_is_ignored_can_only_be_repeated(forms: Forms) -> None:
    sequence = forms.sequence("aa", regex="a*")
    assert forms.allowed(sequence) == {"a", "<end>", "<turn>"}
    for token in forms.ids("<turn>", "<end>", "<end>"):
        sequence.token_ids.append(token)
        assert forms.allowed(sequence) == {"<end>", "<turn>"}
    replayed = forms.sequence("aa", regex="a*")
    replayed.token_ids += sequence.token_ids[-3:]
    assert forms.allowed(replayed) == {"<end>", "<turn>"}


def test_tokens_that_span_parts_of_the_form_are_allowed(forms: Forms) -> None:
    assert "{}" in forms.allowed(forms.sequence("", json={"type": "object"}))
    assert forms.allowed(forms.sequence("", choice=["maybe", "no"])) == {"m", "maybe", "n", "no"}


def test_special_tokens_stand_only_where_a_grammar_names_them(forms: Forms) -> None:
    assert not {"<image>", "<end>"} & forms.allowed(forms.sequence("", regex=".+"))
    assert forms.allowed(forms.sequence("", grammar='start: <image> "a"')) == {"<image>"}


def test_masks_are_a_pure_function_of_the_output(forms: Forms) -> None:
    """Step by step, and replayed at once after a preemption or by another worker."""
    text = '{"name": "x y", "age": 30, "tags": ["a"]}'
    growing = forms.sequence(json=SCHEMA)
    for token in forms.fast.encode(text, add_special_tokens=False).ids:
        fresh = forms.sequence(json=SCHEMA)
        fresh.token_ids = growing.token_ids.copy()
        step, replay = forms.masks(growing, fresh).bits
        assert np.array_equal(step, replay)
        growing.token_ids.append(token)
    assert forms.allowed(growing) == {"<end>", "<turn>"}


def test_a_sequence_whose_tokens_are_replaced_starts_again(forms: Forms) -> None:
    sequence = forms.sequence("aa", regex="a{3}|b{3}")
    assert forms.allowed(sequence) == {"a"}
    sequence.token_ids = forms.sequence("b", regex="b").token_ids
    assert forms.allowed(sequence) == {"b"}


def test_masks_of_many_sequences_do_not_depend_on_their_company(forms: Forms) -> None:
    sequences = [forms.sequence("a" * (i % 4), regex=f"a{{{i % 7 + 3}}}b") for i in range(40)]
    together = forms.masks(*sequences).bits
    for sequence, bits in zip(sequences, together, strict=True):
        alone = forms.masks(forms.sequence("", regex="x"), sequence).bits[1]
        assert np.array_equal(alone, bits)


def test_an_output_that_left_its_form_fails_alone(forms: Forms) -> None:
    masks = forms.masks(forms.sequence("a", regex="a+"), forms.sequence("b", regex="a+"))
    assert list(masks.failed) == [1]
    assert masks.failed[1].field == "structured_outputs.regex"
    assert "does not have this form" in masks.failed[1].message


def test_a_form_that_costs_too_much_on_the_way_fails_alone(forms: Forms) -> None:
    costly = forms.sequence("a", regex="((a{1,100}){1,100}){1,100}")
    plain = forms.sequence("a", regex="a+")
    for _ in range(60):
        masks = forms.masks(costly, plain)
        if masks.failed:
            break
        costly.token_ids.append(costly.token_ids[-1])
    assert list(masks.failed) == [0]
    assert masks.failed[0].code == "invalid_request"
    assert masks.failed[0].field == "structured_outputs.regex"
    assert np.unpackbits(masks.bits[1]).any()


def test_finished_sequences_are_let_go(forms: Forms) -> None:
    first, second = (forms.sequence("a", regex="a+") for _ in range(2))
    forms.masks(first, second)
    first.status = SequenceStatus.FINISHED
    forms.masks(second)
    assert list(forms.matchers._progress) == [second]


def test_forms_are_compiled_once_and_the_oldest_are_let_go(
    forms: Forms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "_MAX_COMPILED", 2)
    one, two, three = (StructuredOutputs(regex=f"a{{{i}}}") for i in (1, 2, 3))
    forms.compiler.expect(one)
    first = forms.compiler._submit(one)
    assert forms.compiler._submit(StructuredOutputs(regex="a{1}")) is first
    forms.compiler.expect(two)
    forms.compiler.matcher(one)
    forms.compiler.expect(three)
    assert forms.compiler._submit(one) is first
    assert len(forms.compiler._compiled) == 2


@pytest.mark.parametrize(
    ("form", "field", "message"),
    [
        ({"regex": "[a-z"}, "regex", "unclosed character class"),
        ({"regex": r"(a)\1"}, "regex", "backreferences are not supported"),
        ({"grammar": "start: missing"}, "grammar", "unknown name"),
        ({"grammar": "nothing here"}, "grammar", "Expected token"),
        ({"json": {"type": "wrong"}}, "json", "Invalid type"),
        ({"json": {"not": {"type": "string"}}}, "json", "Unimplemented keys"),
        ({"json": {"$ref": "#/missing"}}, "json", "does not exist"),
        ({"json": {"$ref": "http://example.com/schema"}}, "json", "not present in a registry"),
        (
            {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
            "json",
            "Unsatisfiable schema",
        ),
    ],
)
def test_a_form_that_cannot_be_compiled_is_refused_with_its_field(
    forms: Forms, form: dict[str, Any], field: str, message: str
) -> None:
    params = SamplingParams(structured_outputs=form)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_structured_outputs(params)
    assert caught.value.field == f"structured_outputs.{field}"
    masks = forms.masks(forms.sequence(**form))
    assert masks.failed[0].field == f"structured_outputs.{field}"


def test_good_forms_and_none_pass_the_check() -> None:
    check_structured_outputs(SamplingParams())
    for form in ({"json": SCHEMA}, {"json_object": True}, {"choice": ["a"]}, {"regex": "a|b"}):
        check_structured_outputs(SamplingParams(structured_outputs=form))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "(.*a){25}(.*b){25}"},
        {"regex": "a" * 60000},
        {"choice": [f"{i:04}" * 12 for i in range(1000)]},
        {"json": {"anyOf": [{"properties": {f"p{i}": {"maxLength": i}}} for i in range(500)]}},
    ],
    ids=["stars", "long", "choices", "schema"],
)
def test_the_largest_forms_are_checked_in_bounded_time(form: dict[str, Any]) -> None:
    start = time.perf_counter()
    check_structured_outputs(SamplingParams(structured_outputs=form))
    assert time.perf_counter() - start < 3.0


def test_a_model_without_an_end_token_is_refused(fast: Tokenizer) -> None:
    compiler = FormCompiler(fast.to_str, frozenset())
    with pytest.raises(InvalidRequestError, match="needs a model with an end token"):
        compiler.matcher(StructuredOutputs(regex="a"))
