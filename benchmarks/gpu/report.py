"""The results as one JSON file and one Markdown table."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from gpu.plan import Section

_ROOT: Final = Path(__file__).resolve().parents[2]
#: Folders whose content decides the figures.
_SOURCES: Final = ("kernels", "worker", "protocol", "benchmarks/gpu")


class Report:
    """Collects the sections' records; writes `results.json` and `results.md` to a folder."""

    def __init__(self, folder: Path, *, smoke: bool) -> None:
        self._folder = folder
        self._started = time.monotonic()
        self._notes: list[str] = []
        self._sections: dict[str, dict[str, Any]] = {}
        self._head = {
            "smoke": smoke,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": _commit(),
            "sources_sha256": _sources_digest(),
            "processors": os.cpu_count(),
        }

    def take(self, section: Section, records: list[dict[str, Any]], seconds: float) -> None:
        """Add the records of a section, or of a part of it."""
        held = self._sections.setdefault(
            section.module, {"title": section.title, "seconds": 0.0, "records": []}
        )
        held["seconds"] = max(held["seconds"], round(seconds, 1))
        held["records"] += records

    def note(self, text: str) -> None:
        """Add a remark on the whole run."""
        self._notes.append(text)

    @property
    def num_failed(self) -> int:
        """Records of what did not work."""
        return sum(record["status"] == "failed" for _, record in self._records())

    def write(self) -> None:
        """Write both files; one that is there is replaced in one piece."""
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {
            **self._head,
            "seconds": round(time.monotonic() - self._started, 1),
            "notes": self._notes,
            "sections": self._sections,
        }
        _replace(self._folder / "results.json", json.dumps(content, indent=1) + "\n")
        _replace(self._folder / "results.md", self._table())

    def summary(self, section: Section) -> str:
        """Return a section's lines for the terminal."""
        held = self._sections[section.module]
        lines = [f"== {held['title']} ({held['seconds']} s)"]
        for record in held["records"]:
            lines.append(f"{record['status']:9}{record['case']}: {_result(record)}")
            lines += [f"         | {line}" for line in record["error"].splitlines()[-6:]]
        return "\n".join(lines)

    def closing(self) -> str:
        """Return the last lines for the terminal: what failed or missed its target, and where."""
        lines = [
            f"{record['status']}: {title}: {record['case']}: {_result(record)}"
            for title, record in self._records()
            if record["status"] in ("failed", "missed")
        ]
        seconds = time.monotonic() - self._started
        counts = f"{sum(1 for _ in self._records())} results, {self.num_failed} failed"
        return "\n".join([*lines, f"{counts}, {seconds:.0f} s; {self._folder}/results.json, .md"])

    def _records(self) -> list[tuple[str, dict[str, Any]]]:
        return [(s["title"], record) for s in self._sections.values() for record in s["records"]]

    def _table(self) -> str:
        head = self._head
        lines = [
            "# GPU benchmark" + (" (smoke run on the CPU: no figures)" if head["smoke"] else ""),
            "",
            f"{head['date']}, commit {head['commit'] or 'unknown'}, "
            f"sources {str(head['sources_sha256'])[:12]}. {' '.join(self._notes)}".rstrip(),
            "",
            "| Section | Case | Result | Target | Status |",
            "|---|---|---|---|---|",
        ]
        for title, record in self._records():
            cells = (title, record["case"], _result(record), _target(record), record["status"])
            lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
        return "\n".join(lines) + "\n"


def _result(record: dict[str, Any]) -> str:
    parts = [f"{name} {_quantity(q)}" for name, q in record["quantities"].items()]
    parts += filter(None, (record["note"], record["skipped"]))
    if record["error"]:
        parts.append(record["error"].strip().splitlines()[-1])
    return "; ".join(parts)


def _quantity(quantity: dict[str, Any]) -> str:
    value, unit = quantity["value"], quantity["unit"]
    shown = f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value}"
    if isinstance(value, float) and abs(value) >= 1e4:
        shown = f"{value:.0f}"
    return f"{shown} {unit}".rstrip()


def _target(record: dict[str, Any]) -> str:
    target = record["target"]
    if target is None:
        return ""
    bounds = (("at_least", "≥"), ("at_most", "≤"))
    return " ".join(
        f"{target['name']} {sign} {target[key]:g}"
        for key, sign in bounds
        if target[key] is not None
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _commit() -> str | None:
    """Return the checkout's commit; None where the tree came without its history."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GIT_COMMIT")
    return done.stdout.strip()


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
