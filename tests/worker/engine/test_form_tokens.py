"""Added tokens that are text, such as a model's tags for calls, are text to forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inferq.protocol.params import SamplingParams
from inferq.protocol.structured import StructuredOutputs
from inferq.worker.engine.requests.sequence import EngineRequest, Sequence
from inferq.worker.engine.sampling.form_masks import FormMatchers
from inferq.worker.engine.sampling.form_tokens import with_text_tokens
from inferq.worker.engine.sampling.structured_output import FormCompiler


@pytest.fixture(scope="module")
def fast() -> Tokenizer:
    """Bytes, a tag that is text, one that is special, and an end that is not marked special."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<image>"])
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<tag>", "</tag>", "<end>")])
    return made


def allowed(fast: Tokenizer, text: str, form: StructuredOutputs) -> set[str]:
    """The tokens that the form allows after a text."""
    end = frozenset({fast.token_to_id("<end>")})
    matchers = FormMatchers(FormCompiler(fast.to_str, end), fast.get_vocab_size())
    params = SamplingParams(seed=0, structured_outputs=form)
    request = EngineRequest(request_id="a", prompt_token_ids=(1,), params=params)
    sequence = Sequence(request, 16)
    sequence.token_ids += fast.encode(text, add_special_tokens=False).ids
    masks = matchers.start([sequence]).result()
    assert masks.failed == {}
    bits = np.unpackbits(masks.bits[0], bitorder="little")
    return {fast.id_to_token(token) for token in np.flatnonzero(bits).tolist()}


def test_free_text_may_have_a_tag_that_is_text_and_none_that_is_special(fast: Tokenizer) -> None:
    found = allowed(fast, "a<tag>b", StructuredOutputs(regex="(?s:.*)"))
    assert {"<tag>", "</tag>", "<", "<end>"} <= found
    assert "<image>" not in found


def test_a_tag_that_a_form_demands_is_taken(fast: Tokenizer) -> None:
    grammar = StructuredOutputs(
        grammar='%llguidance {"no_forcing": true}\nstart: "<tag>" /[ab]/ "</tag>"'
    )
    assert allowed(fast, "", grammar) == {"<tag>", "<"}
    assert allowed(fast, "<tag>a", grammar) == {"</tag>", "<"}
    assert allowed(fast, "<tag>a</tag>", grammar) == {"<end>"}
    choice = StructuredOutputs(choice=["<tag>", "no"])
    assert "n" in allowed(fast, "", choice)
    assert allowed(fast, "<tag>", choice) == {"<end>"}


def test_a_tokenizer_without_such_tokens_stays_as_it_is(fast: Tokenizer) -> None:
    content = Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str()
    assert with_text_tokens(content, frozenset()) is content


def pieces(*added: tuple[int, str]) -> str:
    return json.dumps(
        {
            "added_tokens": [{"id": k, "content": text, "special": False} for k, text in added],
            "model": {"type": "Unigram", "vocab": [["▁", -1.0], ["<known>", 0.0]]},
        }
    )


def test_pieces_in_a_list_are_added_at_its_end() -> None:
    made = json.loads(with_text_tokens(pieces((3, "<b c>"), (2, "<a>"), (1, "<known>")), set()))
    assert [piece for piece, _ in made["model"]["vocab"]] == ["▁", "<known>", "<a>", "<b c>"]
    assert [token["content"] for token in made["added_tokens"]] == ["<b c>"]


@pytest.mark.parametrize("added", [(9, "<far>"), (0, "<other>")])
def test_pieces_that_have_no_place_in_the_list_are_left(added: tuple[int, str]) -> None:
    content = pieces((2, "<a>"), added)
    assert with_text_tokens(content, set()) is content
