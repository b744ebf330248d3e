"""`inferq gateway-key`: a key once, and an entry that gateways read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from inferq.producer.gateway.admission.access import KeyLimits
from inferq.producer.gateway.admission.keys import KeyRing
from inferq.protocol.keys import Lane

Run = Callable[..., tuple[int, str, str]]


def test_a_key_opens_the_gateway_that_has_its_entry(run_here: Run, tmp_path: Path) -> None:
    flags = ["--model", "m", "--model", "n", "--lane", "low", "--requests-per-minute", "1"]
    flags += ["--tokens-per-minute", "2", "--max-concurrency", "3"]
    code, output, _ = run_here("gateway-key", "alice", *flags, "--json")
    assert code == 0
    made = json.loads(output)
    file = tmp_path / "keys.json"
    file.write_text(json.dumps([made["entry"]]))
    access = KeyRing(file).authenticate({"authorization": f"Bearer {made['key']}"})
    assert access.key_id == "alice"
    assert access.limits == KeyLimits(1, 2, 3)
    assert access.models == {"m", "n"}
    assert access.lanes == {Lane.LOW}
    assert made["key"] not in file.read_text()


def test_no_two_keys_are_equal_and_people_see_the_key_and_the_entry(run_here: Run) -> None:
    outputs = [run_here("gateway-key", "bob")[1] for _ in range(2)]
    keys = [output.splitlines()[1].strip() for output in outputs]
    assert keys[0] != keys[1]
    assert all(key.startswith("sk-inferq-") and len(key) > 50 for key in keys)
    entry = json.loads(outputs[0].partition("keys:")[2])
    assert set(entry) == {"name", "sha256"}


def test_a_name_or_limit_that_no_gateway_would_read_is_refused(run_here: Run) -> None:
    code, _, said = run_here("gateway-key", "a b")
    assert code == 2
    assert "name: must be 1 to 64 letters" in said
    code, _, said = run_here("gateway-key", "a", "--max-concurrency", "0")
    assert code == 2
    assert "'0' is not a whole number in [1, 2147483647]" in said
