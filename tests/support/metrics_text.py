"""Metrics as a scrape brings them, and as docs/metrics.md has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_plain

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
#: Whatever is named like one of our metrics.
NAME = re.compile(r"\binferq_\w+")
#: Labels of all that a worker tells, which the page says once.
WORKER_LABELS = {"queue", "model_name"}


class Scrape:
    """The families of one answer."""

    def __init__(self, text: str, *, openmetrics: bool = False) -> None:
        parse = parse_openmetrics if openmetrics else parse_plain
        self.families: dict[str, Metric] = {}
        for family in parse(text):
            assert family.name not in self.families, f"{family.name} is there twice"
            self.families[family.name] = family

    @property
    def names(self) -> dict[str, str]:
        """Types by the names that the documentation has."""
        return {full_name(family): family.type for family in self.families.values()}

    @property
    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        """Every sample's name and labels."""
        return {
            (sample.name, tuple(sorted(sample.labels.items())))
            for family in self.families.values()
            for sample in family.samples
        }

    def value(self, name: str, **labels: str) -> float:
        """The only sample of that name with these labels (and perhaps others)."""
        [value] = self.values(name, **labels).values()
        return value

    def values(self, name: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        }


def full_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


@dataclass(frozen=True)
class Documented:
    """A row of the page; `labels` with the values that it lists, None where it lists none."""

    name: str
    kind: str
    labels: dict[str, frozenset[str] | None]
    section: str


def documented() -> dict[str, Documented]:
    """The rows of docs/metrics.md by name."""
    rows: dict[str, Documented] = {}
    for section, names, kind, labels in _rows():
        for name in names:
            assert name not in rows, f"{name} is there twice"
            rows[name] = Documented(name, kind, labels, section)
    return rows


def _rows() -> Iterator[tuple[str, list[str], str, dict[str, frozenset[str] | None]]]:
    section, lanes = "", frozenset({"high", "normal", "low"})
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or cells[1] not in ("gauge", "counter", "histogram"):
            continue
        names = re.findall(r"`(\w+)`", cells[0])
        yield section, names, cells[1], _labels(cells[2], lanes)


def _labels(cell: str, lanes: frozenset[str]) -> dict[str, frozenset[str] | None]:
    """Read `a`: `x`, `y` or `a`, `b`: names before a colon have the values behind it."""
    name, colon, values = cell.partition(":")
    if colon:
        name_of = name.strip("` ")
        as_above = "as above" in values and name_of == "lane"
        told = lanes if as_above else frozenset(re.findall(r"`([^`]+)`", values))
        if "," in name:  # `task`, `outcome`: the values are the last one's
            first, last = re.findall(r"`(\w+)`", name)
            return {first: None, last: told}
        return {name_of: told or None}
    return dict.fromkeys(re.findall(r"`(\w+)`", cell))


def check_against_page(scrape: Scrape, *, more: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """Check that each sample is documented, with its type, labels and values of labels."""
    rows = documented()
    for family in scrape.families.values():
        name = full_name(family)
        assert name in rows, f"docs/metrics.md does not have {name}"
        row = rows[name]
        assert family.type == row.kind, name
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "le" and k not in more}
            assert labels.keys() <= row.labels.keys() | {"queue"}, f"{name}: {labels}"
            for label, value in labels.items():
                known = row.labels.get(label)
                assert known is None or value in known, f"{name}: {label}={value}"
