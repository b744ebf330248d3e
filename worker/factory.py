"""Makes an engine from a model: the one place that knows both the scheduler and the model."""

from __future__ import annotations

from inferq.worker.engine.config import EngineConfig
from inferq.worker.engine.engine import Engine
from inferq.worker.model.loader import WeightLoader, load_weights
from inferq.worker.model.runner import load_runner


def load_engine(config: EngineConfig, load: WeightLoader = load_weights) -> Engine:
    """Load the model, its weights by `load`, and size its KV pool.

    Raises `ModelError` or `InvalidRequestError` for a model or an option that cannot be served.
    """
    runner = load_runner(config, load)
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
    )
