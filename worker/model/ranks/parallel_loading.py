"""Loading of a model that is divided among ranks, of which this process is rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from inferq.protocol.errors import ModelError
from inferq.worker.engine.config import EngineConfig
from inferq.worker.model.architecture.causal_model import ModelShape
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.loading.loader import WeightLoader, load_weights
from inferq.worker.model.loading.model_loading import load_decoder
from inferq.worker.model.ranks.parallel import check_devices, check_division
from inferq.worker.model.ranks.parallel_decoder import ParallelDecoder
from inferq.worker.model.ranks.parallel_group import RankGroup
from inferq.worker.model.ranks.rank_processes import RankProcesses

_log = logging.getLogger(__name__)


def load_divided(
    folder: Path,
    model: ModelShape,
    config: EngineConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    load: WeightLoader,
    on_rank_lost: Callable[[], None] | None = None,
) -> ParallelDecoder:
    """Start the other ranks, and load all shares at the same time.

    On the CPU the ranks divide torch's threads, this process's among them. Raises `ModelError` for
    what cannot be divided.
    """
    size = config.tensor_parallel_size
    if not isinstance(model, ModelConfig):
        raise ModelError(
            f"{model.architecture} is computed by transformers, whose weights are not divided here",
            field="tensor_parallel_size",
        )
    if load is not load_weights:
        raise ModelError("only weights from files are divided", field="tensor_parallel_size")
    check_division(model, size)
    check_devices(size, device)
    threads = max(1, torch.get_num_threads() // size)
    if device.type == "cpu":
        torch.set_num_threads(threads)
        _log.info("%d ranks, each with %d threads; sizes are those of each", size, threads)
    else:
        device = torch.device("cuda", 0)
        _log.info(
            "%d ranks, one on each GPU; sizes are those of each, and no CUDA graphs are captured",
            size,
        )
    settled = replace(
        config,
        model=str(folder),
        revision=None,
        max_model_len=max_model_len,
        dtype=str(dtype).removeprefix("torch."),
    )
    group = RankGroup(0, size, device)
    ranks = RankProcesses(
        {"device": device.type, "threads": threads, "config": asdict(settled)}, group, on_rank_lost
    )
    try:
        decoder = load_decoder(
            folder,
            model,
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            load=load,
            group=group,
        )
        ranks.connect()
    except BaseException:
        ranks.stop("the model could not be loaded")
        raise
    return ParallelDecoder(decoder, group, ranks)
