"""Makes an engine from a model: the one place that knows both the scheduler and the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, Protocol

import torch

from inferq.kernels.native.compiler import NativeBuildError
from inferq.kernels.native.mode import VARIABLE
from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.engine.scheduling.prompt_limit import PromptLimit
from inferq.worker.model.loading.loader import WeightLoader, load_weights
from inferq.worker.model.running.runner import load_runner

_log = logging.getLogger(__name__)

#: `max_prefill_delay_ms` on the CPU, where a prompt of 256 tokens takes half a second.
CPU_PREFILL_DELAY_MS: Final = 100


def load_engine(
    config: EngineConfig,
    load: WeightLoader = load_weights,
    on_rank_lost: Callable[[], None] | None = None,
) -> Engine:
    """Load the model, its weights by `load`, and size its KV pool; see `load_runner`.

    Raises `ModelError` or `InvalidRequestError` for a model or an option that cannot be served.
    """
    try:
        runner = load_runner(config, load, on_rank_lost)
    except NativeBuildError as error:  # only where they are required
        raise ModelError(str(error), field=VARIABLE) from error
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
        prompt_limit=prompt_limit(config, runner),
    )


class MeasuredRunner(Protocol):
    """What the limit of prompt tokens depends on."""

    @property
    def device(self) -> torch.device:
        """Where the model is computed."""

    def prefill_speed(self) -> float:
        """Return how many tokens of a prompt are computed per second."""


def prompt_limit(config: EngineConfig, runner: MeasuredRunner) -> PromptLimit | None:
    """Return the limit on prompts beside decodes that `max_prefill_delay_ms` asks for."""
    delay_ms = config.max_prefill_delay_ms
    if delay_ms is None:
        delay_ms = CPU_PREFILL_DELAY_MS if runner.device.type == "cpu" else 0
    if delay_ms == 0:
        return None
    limit = PromptLimit(delay_ms / 1000, runner.prefill_speed(), config.block_size)
    _log.info(
        "beside decodes, at most %d prompt tokens in a step to begin with (%d ms)",
        limit.tokens,
        delay_ms,
    )
    return limit
