"""Makes an engine from a model: the one place that knows both the scheduler and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import torch

from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.model.loader import WeightLoader, load_weights
from inferq.worker.model.runner import load_runner

_log = logging.getLogger(__name__)

#: `max_prefill_delay_ms` on the CPU, where a prompt of 256 tokens takes half a second.
CPU_PREFILL_DELAY_MS: Final = 150
#: Never fewer: a machine that is busy while the model is loaded looks slow for ever, and smaller
#: steps cost more than they spare.
FEWEST_PROMPT_TOKENS: Final = 32


def load_engine(
    config: EngineConfig,
    load: WeightLoader = load_weights,
    on_rank_lost: Callable[[], None] | None = None,
) -> Engine:
    """Load the model, its weights by `load`, and size its KV pool; see `load_runner`.

    Raises `ModelError` or `InvalidRequestError` for a model or an option that cannot be served.
    """
    runner = load_runner(config, load, on_rank_lost)
    must_compare = config.preemption_mode == "auto" and runner.num_swap_blocks > 0
    return Engine(
        config,
        runner,
        num_blocks=runner.num_blocks,
        max_model_len=runner.max_model_len,
        eos_token_ids=runner.eos_token_ids,
        vocab_size=runner.vocab_size,
        num_swap_blocks=runner.num_swap_blocks,
        speeds=runner.measure() if must_compare else None,
        launches_ahead=runner.launches_ahead,
        max_prompt_tokens=max_prompt_tokens(config, runner),
    )


class MeasuredRunner(Protocol):
    """What the limit of prompt tokens depends on."""

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""

    def prefill_speed(self) -> float:
        """Return how many tokens of a prompt are computed per second."""


def max_prompt_tokens(config: EngineConfig, runner: MeasuredRunner) -> int | None:
    """Return how many prompt tokens `max_prefill_delay_ms` allows in a step with decodes."""
    delay_ms = config.max_prefill_delay_ms
    if delay_ms is None:
        delay_ms = CPU_PREFILL_DELAY_MS if runner.device.type == "cpu" else 0
    if delay_ms == 0:
        return None
    tokens = int(runner.prefill_speed() * delay_ms / 1000)
    allowed = max(FEWEST_PROMPT_TOKENS, tokens // config.block_size * config.block_size)
    _log.info("beside decodes, at most %d prompt tokens in a step (%d ms)", allowed, delay_ms)
    return allowed
