"""Every operation documents itself, and docs/protocol.md knows them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferq.protocol.keys import GROUP

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "protocol" / "lua").glob("*.lua"))
OPERATIONS = [file for file in FILES if file.stem != "prelude"]
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()


@pytest.mark.parametrize("file", OPERATIONS, ids=lambda file: file.stem)
def test_an_operation_opens_with_its_keys_arguments_reply_and_cost(file: Path) -> None:
    header, _, _ = file.read_text().partition("\n\n")
    assert all(line.startswith("--") for line in header.splitlines())
    for part in ("-- KEYS", "-- ARGV", "-- Reply", "-- O("):
        assert part in header
    assert f"| `{file.stem}` |" in DOCUMENT


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_operation_spells_the_name_of_a_shared_key(file: Path) -> None:
    text = file.read_text()
    assert "inferq:" not in text
    assert "'jobs:" not in text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_lines_are_at_most_100_characters_long(file: Path) -> None:
    text = file.read_text()
    assert max(map(len, text.splitlines())) <= 100


def test_the_group_has_one_name() -> None:
    assert f"local GROUP = '{GROUP}'" in (ROOT / "protocol" / "lua" / "prelude.lua").read_text()
    assert f"Group `{GROUP}`" in DOCUMENT
