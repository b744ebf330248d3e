"""How `max_prefill_delay_ms` becomes a number of prompt tokens, by device and by the steps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from inferq.protocol.errors import InvalidRequestError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit
from inferq.worker.factory import prompt_limit


@dataclass
class MeasuredRunner:
    device: torch.device
    speed: float

    def prefill_speed(self) -> float:
        return self.speed


@pytest.mark.parametrize(
    ("delay_ms", "device", "speed", "tokens"),
    [
        (None, "cpu", 1000.0, 96),  # 100 ms, in whole blocks
        (None, "cpu", 10.0, 32),  # never less, or prompts would stand still
        (100, "cpu", 1000.0, 96),
        (0, "cpu", 1000.0, None),
        (None, "cuda", 100_000.0, None),
        (20, "cuda", 100_000.0, 2000),
    ],
)
def test_the_delay_allowed_is_a_number_of_prompt_tokens(
    delay_ms: int | None, device: str, speed: float, tokens: int | None
) -> None:
    config = EngineConfig(model="m", max_prefill_delay_ms=delay_ms)
    limit = prompt_limit(config, MeasuredRunner(torch.device(device), speed))
    assert (None if limit is None else limit.tokens) == tokens


def test_a_machine_that_was_busy_at_the_start_is_not_slow_for_ever() -> None:
    limit = PromptLimit(0.15, tokens_per_s=50.0, block_size=16)
    assert limit.tokens == 32
    for _ in range(60):
        limit.learn(num_decodes=20, num_tokens=20, seconds=0.02)
        limit.learn(num_decodes=20, num_tokens=20 + 32, seconds=0.02 + 32 / 1000)
    assert 128 <= limit.tokens <= 144


def test_a_machine_that_becomes_slow_takes_fewer() -> None:
    limit = PromptLimit(0.15, tokens_per_s=1000.0, block_size=16)
    for _ in range(60):
        limit.learn(num_decodes=0, num_tokens=100, seconds=0.4)
    assert limit.tokens == 32


def test_steps_of_few_prompt_tokens_and_empty_ones_tell_nothing() -> None:
    limit = PromptLimit(0.15, tokens_per_s=1000.0, block_size=16)
    for _ in range(100):
        limit.learn(num_decodes=4, num_tokens=12, seconds=9.0)
        limit.learn(num_decodes=0, num_tokens=0, seconds=9.0)
    assert limit.tokens == 144


@pytest.mark.parametrize("value", [-1, 1.5, True, "fast"])
def test_a_delay_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="max_prefill_delay_ms"):
        EngineConfig(model="m", max_prefill_delay_ms=value)  # type: ignore[arg-type]
