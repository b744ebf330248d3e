"""Whatever field an error names, a caller of the gateway knows it by that name."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import inferq.producer
import inferq.protocol
from inferq.producer.gateway.errors import to_http_error
from inferq.producer.gateway.requests.chat import ask_chat
from inferq.producer.gateway.requests.completion import ask_completion
from inferq.producer.gateway.requests.schemas import ChatBody, CompletionBody, TokenizeBody
from inferq.producer.gateway.requests.submission import TOKENS_FIELD
from inferq.producer.gateway.settings import GatewaySettings
from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.params import SamplingParams

BODIES = (CompletionBody, ChatBody, TokenizeBody)
KNOWN = {name for body in BODIES for name in body.model_fields} | {
    *("X-Inferq-Deadline", "Idempotency-Key", "id", "body")
}
#: What no request can set, so that no error about it can be a request's.
OUT_OF_REACH = {
    *("client", "delay", "delay_s", "entry_id", "from_offset", "not_before", "note", "params"),
    *("partition", "queue", "reconnect_s", "retention", "retention_s", "return_prompt_token_ids"),
    *("task", "timeout_s", "trace_context", "url", "worker"),
}
#: Names of parameters and of `submit`'s arguments that are no field of a body.
STRANGE = (
    {each.name for each in dataclasses.fields(SamplingParams)}
    | {"idempotency_key", "deadline_s", "num_logprobs"}
) - KNOWN


def _named_fields() -> Iterator[str]:
    """Names of fields in the calls that raise or check, as far as they are written out."""
    for package in (inferq.protocol, inferq.producer):
        for path in Path(package.__path__[0]).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield from _names(node)


def _names(call: ast.Call) -> Iterator[str]:
    function = call.func.id if isinstance(call.func, ast.Name) else ""
    named = [each.value for each in call.keywords if each.arg == "field"]
    if re.match(r"_?check_|strings|token_|_milliseconds", function):
        named += call.args[:1]
    for value in named:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


def test_every_field_that_an_error_may_name_is_one_of_the_gateways() -> None:
    fields = set(_named_fields())
    assert {"beam_width", "n", "prompt_token_ids", "webhook.url"} <= fields
    for field in fields - OUT_OF_REACH - {TOKENS_FIELD}:  # renamed where the kind is known
        shown = to_http_error(InvalidRequestError("is bad", field=field))
        assert str(shown.param).partition(".")[0] in KNOWN, field
        assert shown.message == f"{shown.param}: is bad"


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (kind, field.name)
        for kind, body in (("completion", CompletionBody), ("chat", ChatBody))
        for field in dataclasses.fields(SamplingParams)
        if field.name in body.model_fields
    ],
)
@pytest.mark.parametrize("more", [{}, {"use_beam_search": True}, {"temperature": 0}, {"n": 3}])
def test_no_parameter_of_a_body_is_refused_in_other_words(
    kind: str, field: str, more: dict[str, Any]
) -> None:
    body = CompletionBody if kind == "completion" else ChatBody
    for value in (-3, 0, 2, 10**12, [], ["x"] * 5000, [-1], True, "", "never", {"x": 1}):
        given = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], **more}
        del given["messages" if kind == "completion" else "prompt"]
        try:
            if kind == "completion":
                made = CompletionBody.model_validate({**given, field: value})
                ask_completion(made, "m", GatewaySettings(max_prompts=2))
            else:
                ask_chat(ChatBody.model_validate({**given, field: value}), "m", GatewaySettings())
        except InvalidRequestError as error:
            shown = to_http_error(error)
            assert str(shown.param).partition(".")[0] in body.model_fields
            assert not STRANGE & set(re.findall(r"\w+", shown.message)), shown.message
        except ValueError:
            continue  # of the wrong type
