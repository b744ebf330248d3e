"""What a worker would find on this machine, as plain facts: `inferq doctor` judges them.

Run as a program it prints them as JSON, so that whoever asks need not hang with a driver.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from inferq.kernels.native.compiler import NativeBuildError, Toolchain
from inferq.protocol.errors import ModelError
from inferq.worker.engine.text.tokenizer import Tokenizer
from inferq.worker.insight.facts import Facts, GpuFacts, MachineFacts, ModelFacts
from inferq.worker.model.architecture.config import ModelConfig
from inferq.worker.model.loading.loader import check_weight_files
from inferq.worker.model.loading.model_loading import read_model_config
from inferq.worker.model.loading.model_store import cache_root, check_package_name, resolve_model
from inferq.worker.model.loading.refusals import PickledWeights
from inferq.worker.model.sizing.memory import available_memory


def read_machine() -> MachineFacts:
    """Ask torch, the compiler and the system."""
    gpus, driver_problem = _gpus()
    compiler, compiler_problem = _compiler()
    cache = cache_root()
    existing = next(folder for folder in (cache, *cache.parents) if folder.is_dir())
    return MachineFacts(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        gpus=gpus,
        driver_problem=driver_problem,
        has_triton=importlib.util.find_spec("triton") is not None,
        compiler=compiler,
        compiler_problem=compiler_problem,
        memory_bytes=available_memory(),
        cache_folder=str(cache),
        cache_free_bytes=shutil.disk_usage(existing).free,
    )


def _gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    if torch.version.cuda is None:
        return (), None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return tuple(_gpu(index) for index in range(torch.cuda.device_count())), None
    except (RuntimeError, AssertionError) as error:
        return (), str(error).splitlines()[0]


def _gpu(index: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return GpuFacts(properties.name, (properties.major, properties.minor), total, free)


def _compiler() -> tuple[str | None, str | None]:
    try:
        return Toolchain.find(Path()).version.splitlines()[0], None
    except NativeBuildError as error:
        return None, str(error)


def read_model(model: str) -> ModelFacts:
    """Look at a model as a worker that is started with it would, without reading its weights."""
    try:
        folder = Path(resolve_model(model)).expanduser()
    except ModelError as error:
        return ModelFacts(None, config_problem=str(error))
    if not folder.is_dir():
        is_path = folder.is_absolute() or folder.exists() or model.startswith(".")
        if is_path:
            return ModelFacts(None, config_problem=f"{model} is no folder")
        return ModelFacts(None, name_problem=check_package_name(model))
    found: dict[str, Any] = {}
    try:
        config = read_model_config(folder)
        found["architecture"] = config.architecture
        found["is_native"] = isinstance(config, ModelConfig)
        found["max_model_len"] = config.max_position_embeddings
    except ModelError as error:
        found["config_problem"] = str(error)
    try:
        found["weight_bytes"] = check_weight_files(folder)
    except ModelError as error:
        found["weights_problem"] = str(error)
        found["are_pickles"] = isinstance(error, PickledWeights)
    try:
        found["has_chat_template"] = Tokenizer.load(folder).has_chat_template
    except ModelError as error:
        found["tokenizer_problem"] = str(error)
    return ModelFacts(str(folder), **found)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the facts of this machine, and of a model, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m inferq.worker.insight.diagnosis")
    parser.add_argument("--model", help="folder, packaged model or hub id")
    model: str | None = parser.parse_args(argv).model
    facts = Facts(read_machine(), None if model is None else read_model(model))
    print(json.dumps(asdict(facts)))  # noqa: T201 - what it is run for


if __name__ == "__main__":
    main()
