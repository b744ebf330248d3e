"""The engine on a stand-in for the model, for all tests of this folder."""

from __future__ import annotations

import pytest
from engine_simulation import Simulation


@pytest.fixture(scope="session")
def simulation() -> type[Simulation]:
    """The class: each test makes the engine it needs."""
    return Simulation
