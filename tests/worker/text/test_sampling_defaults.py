"""generation_config.json speaks for requests that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from inferq.protocol.errors import ModelError
from inferq.protocol.messages import TokenPrompt
from inferq.protocol.params import SamplingParams
from inferq.worker.engine.requests.request import prepare_request
from inferq.worker.engine.sampling.sampling_defaults import SamplingDefaults
from inferq.worker.engine.text.tokenizer import Tokenizer


def load(folder: Path, **content: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return SamplingDefaults.load(folder)


def test_what_is_not_given_is_the_models_and_what_is_given_stays(tmp_path: Path) -> None:
    defaults = load(
        tmp_path, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, min_p=None,
        do_sample=True, eos_token_id=[1, 2],
    )  # fmt: skip
    params = defaults.apply(SamplingParams(temperature=1.0, max_tokens=5))
    assert (params.temperature, params.top_p, params.top_k) == (1.0, 0.9, 20)
    assert (params.repetition_penalty, params.min_p, params.max_tokens) == (1.1, 0.0, 5)


def test_a_beam_search_takes_only_what_goes_with_it(tmp_path: Path) -> None:
    defaults = load(tmp_path, temperature=0.6, top_k=20, repetition_penalty=1.2)
    params = defaults.apply(SamplingParams(beam_width=3))
    assert (params.temperature, params.top_k, params.repetition_penalty) == (1.0, 0, 1.2)


def test_a_folder_without_the_file_changes_nothing(tmp_path: Path) -> None:
    params = SamplingParams()
    assert SamplingDefaults.load(tmp_path).apply(params) is params


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperature": "hot"}', "temperature: must be a finite number"),
        ('{"top_p": 3}', "top_p: 3 is not in .*generation_config=none ignores the file"),
        ("{", "does not hold a JSON object"),
        ("[]", "does not hold a JSON object"),
    ],
)
def test_a_bad_value_is_an_error_at_the_start(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        SamplingDefaults.load(tmp_path)


@pytest.mark.parametrize(("switch", "temperature"), [("auto", 0.25), ("none", 1.0)])
def test_a_request_is_prepared_with_them_unless_they_are_switched_off(
    tmp_path: Path, switch: str, temperature: float
) -> None:
    fast = FastTokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    fast.decoder = decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    load(tmp_path, temperature=0.25)
    tokenizer = Tokenizer.load(tmp_path, switch)

    prepared = prepare_request(
        TokenPrompt((0, 1)), SamplingParams(), tokenizer, max_model_len=32, vocab_size=2
    )
    assert prepared.params.temperature == temperature


def test_a_given_default_crosses_the_queue_and_one_not_given_does_not() -> None:
    given = SamplingParams(temperature=1.0, top_k=0)
    assert given.to_wire() == {"temperature": 1.0, "top_k": 0}
    again = SamplingParams.from_wire(given.to_wire())
    assert [again.is_given(name) for name in ("temperature", "top_k", "top_p")] == [
        True,
        True,
        False,
    ]
    assert SamplingParams().to_wire() == {}
    assert given == SamplingParams()
