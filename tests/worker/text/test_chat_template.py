"""Chat templates render as in transformers, in a sandbox."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.messages import ChatMessage
from inferq.worker.engine.text.chat_template import ChatTemplate

MESSAGES = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", 'Is 1 < 2 & "3"? é'),
    ChatMessage("assistant", "Yes"),
]
#: What templates in use are written with.
TEMPLATES = {
    "loop": (
        "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
        "{{ message.content | trim }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "blocks-on-their-own-lines": (
        "{% for message in messages %}\n"
        "    {% if message.role == 'system' %}\n"
        "{{ message.content }}\n"
        "    {% else %}\n"
        "        {{- message.content -}}\n"
        "    {% endif %}\n"
        "{% endfor %}\n"
    ),
    "loop-controls": (
        "{% for m in messages %}{% if loop.index0 == 0 %}{% continue %}{% endif %}"
        "{{ m.content }}{% break %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "namespace": (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% set ns.text = ns.text + m.content %}{% endfor %}{{ ns.text }}"
    ),
    "no-tools": "{% if tools is not none or documents %}tools{% else %}none{% endif %}",
    "slice-and-filters": "{{ messages[1:] | map(attribute='content') | join('|') | upper }}",
}


def _render(source: str, **options) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(MESSAGES, **options)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(name, add_generation_prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[[{"role": m.role, "content": m.content} for m in MESSAGES]],
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert _render(TEMPLATES[name], add_generation_prompt=add_generation_prompt) == expected


def test_the_date_is_the_one_given():
    now = datetime(2026, 3, 1, 23, 59, tzinfo=UTC)
    assert _render("{{ strftime_now('%d %b %Y') }}", now=now) == "01 Mar 2026"


def test_what_a_template_raises_is_an_error_of_the_messages():
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        _render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].content }}",
        "{{ messages + 1 }}",
        "{{ 1 // 0 }}",
        "{{ none.content.x }}",
    ],
)
def test_what_goes_wrong_in_a_template_is_an_error_of_the_messages(source):
    with pytest.raises(InvalidRequestError, match="chat template refuses") as caught:
        _render(source)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ strftime_now.__self__.year }}",
        "{{ raise_exception.__globals__['json'] }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(InvalidRequestError, match="messages"):
        _render(source)


def test_a_template_that_does_not_compile_is_an_error_of_the_model():
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate("{% for %}", {})
