"""Small decode steps that are recorded on the CPU give what all others do, bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inferq.kernels.native.library import load_native
from inferq.kernels.native.recording import Recording
from inferq.worker.model.running import recorded_decodes
from inferq.worker.model.running.recorded_decodes import MOST_SEQUENCES, STEPS_BEFORE

Make = Callable[..., Any]

#: Families, with settings of their own, whose layers are native calls only.
RECORDED = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Mistral", {"sliding_window": 24}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 16}),
    ("Phi3", {"pad_token_id": 0}),
    ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    ("Gemma3Text", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
]


@pytest.fixture(autouse=True)
def need_native() -> None:
    if load_native() is None:
        pytest.skip("no native kernels here")


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record without delay, and give the number of rows of each step that was repeated."""
    monkeypatch.setattr(recorded_decodes, "STEPS_BEFORE", 0)
    sizes: list[int] = []
    repeat = Recording.repeat

    def counted(recording: Recording) -> Any:
        sizes.append(recording.output.shape[0])
        return repeat(recording)

    monkeypatch.setattr(Recording, "repeat", counted)
    return sizes


def results(make_loop: Make, random_text: Make, count: int = 6, **options: Any) -> Any:
    """Run sequences that end one after the other; return all that was sampled, with logprobs."""
    loop = make_loop(**options)
    sequences = [
        loop.add(random_text(5 + 7 * i, i), max_tokens=6 + 5 * i, logprobs=5) for i in range(count)
    ]
    loop.run(sequences)
    # blocks that others wrote before, in another order
    again = [loop.add(random_text(30 + i, i), max_tokens=9, logprobs=5) for i in range(count)]
    loop.run(again)
    return [loop.results[sequence] for sequence in [*sequences, *again]]


@pytest.mark.parametrize(
    ("family", "settings", "dtype"),
    [*[(*each, "float32") for each in RECORDED], *[(*each, "bfloat16") for each in RECORDED[1::3]]],
)
def test_recorded_steps_give_what_others_give(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    repeated: list[int],
    family: str,
    settings: dict[str, Any],
    dtype: str,
) -> None:
    folder = make_model(family, **settings)

    def make_loop(**options: Any) -> Any:
        return loop_of(folder, dtype=dtype, block_size=8, **options)

    expected = results(make_loop, random_text, enforce_eager=True)
    assert not repeated
    assert results(make_loop, random_text) == expected
    assert set(repeated) == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "bfloat16"}])
def test_other_weights_and_caches_are_recorded_too(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    repeated: list[int],
    options: dict[str, Any],
) -> None:
    folder = make_model()

    def make_loop(**more: Any) -> Any:
        return loop_of(folder, **options, **more)

    expected = results(make_loop, random_text, enforce_eager=True)
    assert results(make_loop, random_text) == expected
    assert repeated


def test_larger_steps_are_not_recorded(
    make_model: Make, loop_of: Make, random_text: Make, repeated: list[int]
) -> None:
    loop = loop_of(make_model(), max_num_seqs=128, num_kv_blocks=256)
    loop.run([loop.add(random_text(20, i), max_tokens=4) for i in range(MOST_SEQUENCES + 1)])
    assert not repeated
    loop.run([loop.add(random_text(20, i), max_tokens=4) for i in range(MOST_SEQUENCES)])
    assert set(repeated) == {MOST_SEQUENCES}


def test_a_size_is_recorded_when_it_has_come_often(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    repeated: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorded_decodes, "STEPS_BEFORE", STEPS_BEFORE)
    loop = loop_of(make_model())
    # the prompt's step, those before, and the one that is recorded
    loop.run([loop.add(random_text(9, 1), max_tokens=STEPS_BEFORE + 2)])
    assert not repeated
    loop.run([loop.add(random_text(9, 1), max_tokens=3)])
    assert repeated == [1, 1]


def test_prompts_that_are_computed_one_token_at_a_time_give_the_same(
    make_model: Make, loop_of: Make, random_text: Make, repeated: list[int]
) -> None:
    folder, found = make_model(), []
    for options in ({"enforce_eager": True}, {}):
        loop = loop_of(folder, **options)
        sequences = [
            loop.add(random_text(9 + i, i), prompt_logprobs=2, max_tokens=5) for i in range(3)
        ]
        loop.run(sequences, chunk=1)
        found.append([loop.results[sequence] for sequence in sequences])
    assert found[0] == found[1]
    assert repeated


def test_groups_that_share_a_prefix_give_the_same(
    make_model: Make, loop_of: Make, random_text: Make, repeated: list[int]
) -> None:
    folder, found = make_model(), []
    for options in ({"enforce_eager": True}, {}):
        loop = loop_of(folder, block_size=8, num_kv_blocks=256, **options)
        parent = loop.add(random_text(80, 1), max_tokens=20)
        other = loop.add(random_text(11, 2), max_tokens=20)
        loop.step([parent, other])
        children = [loop.fork(parent, index) for index in range(1, 15)]
        for child in children:
            loop.copy_on_write(child)
        everyone = [parent, other, *children]
        while len(parent.output_token_ids) < 20:
            loop.step(everyone)
        found.append([loop.results[sequence] for sequence in everyone])
    assert found[0] == found[1]
    assert repeated


@pytest.mark.parametrize("family", ["GPT2", "OPT"])
def test_what_torch_computes_in_between_is_not_recorded_and_the_log_says_so(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    repeated: list[int],
    caplog: pytest.LogCaptureFixture,
    family: str,
) -> None:
    loop = loop_of(make_model(family, num_key_value_heads=4, word_embed_proj_dim=64, ffn_dim=96))
    caplog.clear()
    with caplog.at_level(logging.INFO, "inferq"):
        loop.run([loop.add(random_text(9, i), max_tokens=4 + i) for i in range(3)])
    assert not repeated
    assert sum("are not recorded: aten." in message for message in caplog.messages) == 1


def test_adapters_are_computed_as_ever(
    make_model: Make,
    loop_of: Make,
    random_text: Make,
    write_adapter: Make,
    repeated: list[int],
    tmp_path: Path,
) -> None:
    folder = make_model()
    adapter = write_adapter(tmp_path / "adapter", folder, ["q_proj", "up_proj"], rank=4, seed=1)
    found = []
    for options in ({"enforce_eager": True}, {}):
        loop = loop_of(folder, lora_adapters={"one": str(adapter)}, **options)
        plain = loop.add(random_text(9, 1), max_tokens=12, logprobs=3)
        adapted = loop.add(random_text(9, 1), adapter="one", max_tokens=6, logprobs=3)
        loop.run([plain, adapted])
        found.append([loop.results[plain], loop.results[adapted]])
    assert found[0] == found[1]
    assert found[0][0][:6] != found[0][1]
    assert set(repeated) == {1}  # after the end of the one with the adapter
