"""Prompts become the token ids that the model's own tokenizer gives, with one BOS."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers.processors import TemplateProcessing

from inferq.protocol.errors import InvalidRequestError, ModelError
from inferq.protocol.messages import ChatMessage
from inferq.worker.engine.text.tokenizer import Tokenizer

CAPITAL = [ChatMessage("user", "What is the capital of France?")]
#: "What is the capital of France?" in SmolLM2's template, which adds a system message.
CAPITAL_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411),
    *(407, 19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1),
    *(520, 9531, 198),
]

#: Prompts of the reference (transformers) with their token ids.
REFERENCE_IDS = {
    "Ďábelské ďatlíky žijí v": (
        "143 232 5415 82 1025 91 2756 24488 233 261 92 6160 3740 18811 139 5271 6160 386"
    ),
    "今天天气如何？": "15076 228 18614 119 18614 119 177 125 238 176 43580 18645 239 8083 249",  # noqa: RUF001
    "🫠🇫🇷👩‍👩‍👧 means": (
        "10813 121 250 10813 225 121 10813 225 132 10813 235 119 321 231 10813 235 119 321 231 "
        "10813 235 117 1530"
    ),
    "Here is the English alphabet: ABC": "4590 314 260 2321 12567 42 17638",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n': (
        "1604 3987 46477 24 94 727 472 1620 14362 260 304 29 373 24681 46477 1230 7996 198"
    ),
    '{"name": "Ada", "born": 1815, "languages": [': (
        "39428 1245 1799 476 4503 81 1002 476 6862 1799 216 33 40 33 37 28 476 92 20776 1799 933"
    ),
    "    leading and   many    spaces\n\n\n": "333 2899 284 256 800 333 5600 16506",
}


@pytest.fixture
def bos_tokenizer(make_tokenizer) -> Tokenizer:
    """A tokenizer that puts a BOS before every text, as Llama's do."""
    fast = make_tokenizer()._fast
    bos = fast.token_to_id("<s>")
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return Tokenizer(
        fast,
        special_tokens={"bos_token": "<s>"},
        chat_template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    )


def test_a_text_gets_the_special_tokens_that_the_tokenizer_adds(bos_tokenizer, make_tokenizer):
    bos, a = bos_tokenizer.bos_token_id, bos_tokenizer._fast.token_to_id("a")
    assert bos_tokenizer.encode("a") == [bos, a]
    assert make_tokenizer().encode("a") == [a]


def test_a_chat_template_that_renders_bos_gives_one_bos(bos_tokenizer):
    ids = bos_tokenizer.render_chat([ChatMessage("user", "a")])
    assert ids == [bos_tokenizer.bos_token_id, bos_tokenizer._fast.token_to_id("a")]


def test_a_text_that_was_rendered_with_bos_gives_one_bos(bos_tokenizer):
    text = bos_tokenizer.chat_text([ChatMessage("user", "a")])
    assert text == "<s>a"
    assert bos_tokenizer.encode(text) == bos_tokenizer.render_chat([ChatMessage("user", "a")])


def test_a_chat_template_without_bos_gives_none(bos_tokenizer):
    plain = Tokenizer(
        bos_tokenizer._fast,
        special_tokens={"bos_token": "<s>"},
        chat_template="{{ messages[0].content }}",
    )
    assert plain.render_chat([ChatMessage("user", "a")]) == [plain._fast.token_to_id("a")]


def test_an_empty_text_is_bos_alone(bos_tokenizer, make_tokenizer):
    assert bos_tokenizer.encode("") == [bos_tokenizer.bos_token_id]
    tokenizer = make_tokenizer()
    assert tokenizer.encode_batch(["", "a"])[0] == [tokenizer.bos_token_id]


def test_an_empty_text_is_refused_where_there_is_no_bos(make_tokenizer):
    tokenizer = Tokenizer(make_tokenizer()._fast)
    with pytest.raises(InvalidRequestError, match="empty") as caught:
        tokenizer.encode("")
    assert (caught.value.field, caught.value.limit) == ("prompt", "1")


def test_chat_messages_without_a_chat_template_are_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.render_chat(CAPITAL)
    assert caught.value.field == "messages"


def test_texts_are_encoded_alike_alone_in_batches_and_from_many_threads(make_tokenizer):
    tokenizer = make_tokenizer("hello")
    texts = [f"hello {i} 今天 " * (i % 7 + 1) for i in range(200)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
        assert list(pool.map(tokenizer.encode_batch, [texts] * 8)) == [expected] * 8


def test_a_single_token_is_shown_as_it_is(make_tokenizer):
    tokenizer = make_tokenizer("hello")
    assert tokenizer.decode_token(256) == "hello"
    assert tokenizer.decode_token(tokenizer.bos_token_id) == "<s>"


@pytest.fixture
def folder(tmp_path, make_tokenizer):
    """A model folder with the files that concern the tokenizer."""
    make_tokenizer("hello")._fast.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": "from the config",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_special_tokens_are_read_in_both_forms(folder):
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)


def test_truncation_and_padding_that_a_tokenizer_was_saved_with_are_off(folder, make_tokenizer):
    fast = make_tokenizer("hello")._fast
    fast.enable_truncation(2)
    fast.enable_padding(length=8)
    fast.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.load(folder).encode("a b c")) == 5


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "one"}, "one"),
        ({"chat_template": [{"name": "default", "template": "first"}]}, "first"),
    ],
)
def test_the_chat_template_of_the_configuration_is_used(folder, config, expected):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).chat_text(CAPITAL) == expected


def test_the_chat_template_in_a_file_of_its_own_comes_first(folder):
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).chat_text(CAPITAL) == "from the file"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_damaged_tokenizer_is_refused_by_name(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name} is damaged"):
        Tokenizer.load(folder)


@pytest.mark.model
def test_the_real_chat_template_adds_its_system_message(real_tokenizer):
    assert real_tokenizer.render_chat(CAPITAL) == CAPITAL_IDS


@pytest.mark.model
def test_the_real_tokenizer_knows_its_special_tokens(real_tokenizer):
    assert (real_tokenizer.bos_token_id, real_tokenizer.eos_token_id) == (1, 2)
    assert real_tokenizer.vocab_size == 49152
    assert real_tokenizer.encode("") == [1]
    assert real_tokenizer.decode(CAPITAL_IDS[:3]) == "system\n"


@pytest.mark.model
@pytest.mark.parametrize("text", REFERENCE_IDS)
def test_the_real_tokenizer_gives_the_ids_of_the_reference(real_tokenizer, text):
    ids = [int(token_id) for token_id in REFERENCE_IDS[text].split()]
    assert real_tokenizer.encode(text) == ids
    assert real_tokenizer.decode(ids) == text
