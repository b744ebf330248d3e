"""`inferq model import`: a model in the form that workers read."""

from __future__ import annotations

import argparse
from pathlib import Path

from inferq.cli.extras import load_extra


def import_with_progress(source: str, target: Path | None = None) -> Path:
    """Import a packaged model or a .gguf file, with progress on standard error."""
    store = load_extra("inferq.worker.model.loading.model_store", extra="gguf")
    return Path(store.import_model(source, target, progress=True))


def run(arguments: argparse.Namespace) -> int:
    """Import, and print the folder as the last line."""
    target = None if arguments.directory is None else Path(arguments.directory)
    print(import_with_progress(arguments.source, target))
    return 0
