"""What `LLM` refuses before it computes anything, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inferq import LLM, SamplingParams
from inferq.kernels.native import library
from inferq.kernels.native.compiler import NativeBuildError
from inferq.protocol.errors import InvalidRequestError, ModelError

Call = Callable[[Any], object]


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    return LLM(str(smollm2), num_kv_blocks=16, max_model_len=64, max_num_seqs=4)


def test_native_kernels_that_must_be_there_and_cannot_be_are_named(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise NativeBuildError("no C++ compiler")

    monkeypatch.setenv("INFERQ_NATIVE_KERNELS", "require")
    monkeypatch.setattr(library, "_load", fail)
    library.load_native.cache_clear()
    library.native_function.cache_clear()
    try:
        with pytest.raises(ModelError) as caught:
            LLM(str(smollm2), num_kv_blocks=16, max_model_len=64)
    finally:
        library.load_native.cache_clear()
        library.native_function.cache_clear()
    assert caught.value.field == "INFERQ_NATIVE_KERNELS"


@pytest.mark.parametrize("model", [None, 5, ""])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        LLM(model)
    assert caught.value.field == "model"


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda llm: llm.generate(None), "prompts"),
        (lambda llm: llm.generate(5), "prompts"),
        (lambda llm: llm.generate([None]), "prompt"),
        (lambda llm: llm.generate(b"x"), "prompt"),
        (lambda llm: llm.generate({"prompt": 5}), "prompt"),
        (lambda llm: llm.generate({"prompt_token_ids": 5}), "prompt_token_ids"),
        (lambda llm: llm.generate({"prompt_token_ids": "12"}), "prompt_token_ids"),
        (lambda llm: llm.generate([1, True]), "prompt_token_ids"),
        (lambda llm: llm.generate([1.5]), "prompt"),
        (lambda llm: llm.chat(None), "messages"),
        (lambda llm: llm.chat({"role": "user", "content": "x"}), "messages"),
        (lambda llm: llm.chat("x"), "messages"),
        (lambda llm: llm.chat([5]), "messages"),
        (lambda llm: llm.chat([{"role": "user"}]), "messages.content"),
        (lambda llm: llm.chat([{"role": "user", "content": "x", "audio": 1}]), "messages.audio"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], tools="x"), "tools"),
        (
            lambda llm: llm.chat([{"role": "user", "content": "x"}], continue_final_message=True),
            "continue_final_message",
        ),
        (lambda llm: llm.generate("x", 5), "sampling_params"),
        (lambda llm: llm.generate("x", {"temperature": 0}), "sampling_params"),
        (lambda llm: llm.generate(["x"], [None]), "sampling_params"),
        (lambda llm: llm.generate("x", priority=5), "priority"),
        (lambda llm: llm.generate("x", adapter=5), "adapter"),
        (lambda llm: llm.generate("x", adapter="none of ours"), "adapter"),
        (lambda llm: llm.generate("x", adapter=[None, None]), "adapter"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], adapter=""), "adapter"),
    ],
)
def test_input_of_the_wrong_type_is_refused_by_name(llm: LLM, call: Call, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(llm)
    assert caught.value.field == field


def test_numpy_integers_are_token_ids(llm: LLM) -> None:
    ids = list(np.array([5, 6, 7]))
    params = SamplingParams(temperature=0, max_tokens=1)
    for prompt in (ids, [ids], {"prompt_token_ids": ids}):
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        assert output.prompt_token_ids == [5, 6, 7]
        assert all(type(i) is int for i in output.prompt_token_ids)


def test_a_conversation_is_rendered_as_its_options_ask(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello th"}]
    params = SamplingParams(temperature=0, max_tokens=1)
    tokenizer = llm.get_tokenizer()

    def prompt(**options: Any) -> str:
        (output,) = llm.chat(messages, params, use_tqdm=False, **options)
        return tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    begun = prompt()
    assert begun.endswith("<|im_start|>assistant\n")
    opened = prompt(add_generation_prompt=False, continue_final_message=True)
    assert opened.endswith("<|im_start|>assistant\nHello th")
    assert begun.startswith(opened)


def test_a_prompt_that_is_refused_takes_the_others_with_it(llm: LLM) -> None:
    before = llm.stats()
    many = SamplingParams(n=5, max_tokens=1)
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["Hello", "x"], [SamplingParams(max_tokens=4), many], use_tqdm=False)
    assert caught.value.field == "n"
    assert llm.stats() == before  # nothing waits, and nothing was computed
    [output] = llm.generate("Hello", SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert llm.stats().num_running == 0
