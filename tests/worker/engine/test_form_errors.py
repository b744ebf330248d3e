"""What is wrong with a form is said in one sentence, without llguidance's drawings."""

from __future__ import annotations

from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.sampling.structured_output import check_structured_outputs

LOOK_AROUND = "look-around, including look-ahead and look-behind, is not supported"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "["}, "regex: unclosed character class, at '['"),
        ({"regex": 'a\n"/[é'}, "regex: unclosed character class, at '['"),
        ({"regex": "(?=a)b"}, f"regex: {LOOK_AROUND}, at '(?='"),
        ({"regex": "a(?<!b)"}, f"regex: {LOOK_AROUND}, at '(?<!'"),
        ({"regex": r"(a)\1"}, r"regex: backreferences are not supported, at '\1'"),
        ({"regex": r"a\b"}, "regex: word boundaries and other look-around are not supported"),
        ({"grammar": "start: a"}, 'grammar: line 1, column 8: unknown name: "a"'),
        (
            {"grammar": 'start: B\nB: /x/ | /[/\nC: "c"'},
            "grammar: line 2, column 4: unclosed character class, at '['",
        ),
        (
            {"json": {"type": "string", "pattern": "("}},
            "json: unclosed group, at '('",
        ),
        ({"json": {"type": "wrong"}}, "json: Invalid type: wrong"),
    ],
)
def test_an_error_is_a_sentence(form: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_structured_outputs(SamplingParams(structured_outputs=form))
    assert str(caught.value) == f"structured_outputs.{message}"
