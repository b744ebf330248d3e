"""The measurement of the host's part runs, and its parts fit the whole."""

from __future__ import annotations

import host_time
import pytest


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", list(host_time.KINDS))
def test_every_kind_of_step_is_measured(kind: str, ahead: bool) -> None:
    line = host_time.run(kind, 8, 5, ahead=ahead)
    assert (line["kind"], line["sequences"], line["launches_ahead"]) == (kind, 8, ahead)
    parts = [line[name] for name in ("schedule_ms", "inputs_ms", "results_ms")]
    assert all(part > 0 for part in parts)
    assert sum(parts) < 2 * line["step_ms"]
