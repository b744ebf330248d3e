"""The decoder against transformers, in float32."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from inferq.worker.model.architecture.causal_model import StepTensors

Make = Callable[..., Any]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS = {
    "grouped heads": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "as many KV heads as heads": {"num_key_value_heads": 4},
    "7 heads to 1": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112},
    "head_dim wider than hidden / heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "another epsilon": {"rms_norm_eps": 1e-2},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_those_of_transformers_in_any_chunks_and_company(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    random_text: Make,
    variant: dict[str, object],
) -> None:
    folder = make_model(**variant)
    texts = [random_text(length, length) for length in (5, 17, 40, 70)]
    chunks = [[5], [1, 1, 9], [16, 17], [3, 60]]
    ours = driver_of(folder).logits_in_chunks(texts, chunks)
    for text, logits in zip(texts, ours, strict=True):
        torch.testing.assert_close(logits, reference_logits(folder, text), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [8, None])
def test_mistral_sees_its_window_and_no_further(
    make_model: Make,
    driver_of: Make,
    reference_logits: Make,
    random_text: Make,
    window: int | None,
) -> None:
    folder = make_model("Mistral", sliding_window=window)
    texts = [random_text(length, length) for length in (7, 8, 9, 50)]
    ours = driver_of(folder).logits_in_chunks(texts, [[7], [3], [9], [30, 6]])
    for text, logits in zip(texts, ours, strict=True):
        torch.testing.assert_close(logits, reference_logits(folder, text), atol=1e-4, rtol=0)


def test_sequences_may_leave_and_join_between_steps(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make
) -> None:
    folder = make_model()
    driver = driver_of(folder)
    first, second, third = (driver.sequence(random_text(12, seed)) for seed in range(3))
    driver.step([(first, 11), (second, 11)])
    driver.step([(second, 1), (third, 11)])
    (late,) = driver.step([(first, 1)])
    (last,) = driver.step([(third, 1)])
    for sequence, logits in ((first, late), (third, last)):
        expected = reference_logits(folder, sequence.token_ids)[-1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_sequence_that_lost_its_blocks_is_computed_again(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make
) -> None:
    folder = make_model()
    driver = driver_of(folder)
    sequence = driver.sequence(random_text(20, 1))
    driver.step([(sequence, 19)])
    driver.kv_cache[sequence.block_table] = torch.nan
    sequence.block_table, sequence.num_computed_tokens = [], 0
    (logits,) = driver.step([(sequence, 20)])
    expected = reference_logits(folder, sequence.token_ids)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_no_sampled_row_gives_no_logits_but_writes_the_cache(
    make_model: Make, driver_of: Make, reference_logits: Make, random_text: Make
) -> None:
    folder = make_model()
    driver = driver_of(folder)
    sequence = driver.sequence(random_text(6, 1))
    hidden = driver.decoder.hidden
    given = []

    def without_rows(step: StepTensors, kv_cache: torch.Tensor) -> torch.Tensor:
        given.append(driver.decoder.logits(hidden(replace(step, rows=torch.arange(0)), kv_cache)))
        return torch.zeros(5, driver.decoder.config.hidden_size)

    driver.decoder.hidden = without_rows  # type: ignore[method-assign]
    driver.step([(sequence, 5)])
    driver.decoder.hidden = hidden  # type: ignore[method-assign]
    (logits,) = driver.step([(sequence, 1)])
    assert given[0].shape == (0, 97)
    expected = reference_logits(folder, sequence.token_ids)[-1:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
