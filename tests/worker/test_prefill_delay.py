"""How `max_prefill_delay_ms` becomes a number of prompt tokens, by device and measured speed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from inferq.protocol.errors import InvalidRequestError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.factory import max_prompt_tokens


@dataclass
class MeasuredRunner:
    device: torch.device
    speed: float

    def prefill_speed(self) -> float:
        return self.speed


@pytest.mark.parametrize(
    ("delay_ms", "device", "speed", "tokens"),
    [
        (None, "cpu", 1000.0, 144),  # 150 ms, in whole blocks
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
    assert max_prompt_tokens(config, MeasuredRunner(torch.device(device), speed)) == tokens


@pytest.mark.parametrize("value", [-1, 1.5, True, "fast"])
def test_a_delay_that_is_none_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="max_prefill_delay_ms"):
        EngineConfig(model="m", max_prefill_delay_ms=value)  # type: ignore[arg-type]
