"""Conversations with tools, names for the template, and open ends render as in transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inferq.protocol.errors import InvalidRequestError
from inferq.protocol.prompts import ChatMessage
from inferq.worker.engine.text.chat_template import ChatTemplate
from inferq.worker.engine.text.tokenizer import Tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Počasí <b>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Příbram", "days": 2}'},
}
TURNS = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", None, {"tool_calls": [CALL], "reasoning_content": "Ask."}),
    ChatMessage("tool", "Sunny", {"tool_call_id": "call_1", "name": "weather"}),
]
#: What templates for tools are written with.
TOOLS_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.thinking %}<think>{{ m.thinking }}|{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}:"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}"
    "{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id is defined %}#{{ m.tool_call_id }}/{{ m.name }}{% endif %}"
    "{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<no-think>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPEN_TEMPLATES = {
    "as-it-is": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}",
    "trimmed": "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}",
    "stripped-left": "{% for m in messages %}{{ m.content.lstrip() }}</s>{% endfor %}",
}


def in_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        conversations=[messages], chat_template=template, eos_token="</s>", **options
    )
    assert isinstance(text, str)
    return text


def as_maps(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as users of transformers write them: arguments as objects, content as text."""
    maps = []
    for message in messages:
        shown = {"role": message.role, **json.loads(json.dumps(message.extra))}
        shown["content"] = message.content or ""
        for call in shown.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        maps.append(shown)
    return maps


def render(template: str, messages: list[ChatMessage], **options: Any) -> str:
    return ChatTemplate(template, {"eos_token": "</s>"}).render(messages, **options)


@pytest.mark.parametrize("tools", [[], [TOOL], [TOOL, TOOL]], ids=len)
@pytest.mark.parametrize("thinks", [True, False])
def test_a_conversation_with_tools_renders_as_in_transformers(tools: list[Any], thinks: bool):
    expected = in_transformers(
        TOOLS_TEMPLATE,
        as_maps(TURNS),
        tools=tools or None,
        add_generation_prompt=True,
        enable_thinking=thinks,
    )
    names = {"enable_thinking": thinks}
    assert render(TOOLS_TEMPLATE, TURNS, tools=tools, names=names) == expected
    assert "city=Příbram;days=2;" in expected


def test_a_message_without_content_has_empty_text_since_templates_put_strings_before_it():
    assert render("{% for m in messages %}{{ '>' + m.content }}{% endfor %}", TURNS[2:3]) == ">"


@pytest.mark.parametrize("text", ['{"city": "Pří', "Prague", "[1]"])
def test_arguments_that_are_no_object_are_the_text_they_are(text: str):
    call = {"function": {"name": "weather", "arguments": text}}
    turn = ChatMessage("assistant", None, {"tool_calls": [call]})
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(template, [turn]) == text
    with pytest.raises(InvalidRequestError, match="template refuses them") as caught:
        render(TOOLS_TEMPLATE, [turn])
    assert caught.value.field == "messages"


def test_no_tools_are_none_in_a_template():
    assert render("{{ tools is none }}", TURNS[:1]) == "True"


def test_names_for_the_template_do_not_replace_what_the_request_sets():
    names = {"messages": [], "eos_token": "x", "extra": 5}
    template = "{{ messages | length }}{{ eos_token }}{{ extra }}"
    assert render(template, TURNS, names=names) == "4</s>5"


@pytest.mark.parametrize("name", OPEN_TEMPLATES)
@pytest.mark.parametrize(
    "content", ["Once upon", "Once upon ", "  Once\n\n", "x", "", " ", "a</s>b", "Weather?"]
)
def test_an_open_message_ends_where_it_ends_in_transformers(name: str, content: str):
    turns = [*TURNS[:2], ChatMessage("assistant", content)]
    expected = in_transformers(
        OPEN_TEMPLATES[name],
        as_maps(turns),
        add_generation_prompt=False,
        continue_final_message=True,
    )
    rendered = render(
        OPEN_TEMPLATES[name], turns, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
)
def test_a_template_that_hides_the_open_message_refuses_it(template: str):
    turns = [*TURNS[:2], ChatMessage("assistant", "Once upon")]
    with pytest.raises(InvalidRequestError) as caught:
        render(template, turns, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_what_a_template_says_of_tools_is_an_error_of_the_messages():
    template = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match="no tools here") as caught:
        render(template, TURNS, tools=[TOOL])
    assert caught.value.field == "messages"


def test_a_model_with_a_template_for_tools_uses_it_for_conversations_with_tools(make_tokenizer):
    fast = make_tokenizer()._fast
    tokenizer = Tokenizer(fast, chat_template="plain", tool_template="with tools")
    assert tokenizer.chat_text(TURNS) == "plain"
    assert tokenizer.chat_text(TURNS, tools=[]) == "plain"
    assert tokenizer.chat_text(TURNS, tools=[TOOL]) == "with tools"


@pytest.mark.parametrize("form", ["listed", "files"])
def test_templates_by_name_are_read_from_a_models_folder(make_tokenizer, tmp_path, form: str):
    (tmp_path / "tokenizer.json").write_text(make_tokenizer()._fast.to_str())
    named = {"default": "plain", "tool_use": "with tools", "rag": "other"}
    if form == "listed":
        listed = [{"name": name, "template": text} for name, text in named.items()]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    else:
        (tmp_path / "chat_template.jinja").write_text(named.pop("default"))
        folder = tmp_path / "additional_chat_templates"
        folder.mkdir()
        for name, text in named.items():
            (folder / f"{name}.jinja").write_text(text)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.chat_text(TURNS) == "plain"
    assert tokenizer.chat_text(TURNS, tools=[TOOL]) == "with tools"
