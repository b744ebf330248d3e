"""What was measured, when and on which machine; and how a run compares with the last and the peers.

A record is one small JSON file in `results/`. A figure's name says what it is: its last part tells
whether more or less is better.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PEERS = "peers.json"
#: Figures of which less is better end so.
_LESS_IS_BETTER = re.compile(r"(_ms|_us_per_\w+|_us|_bytes|seconds)$")
#: Instruction sets that decide how fast a CPU computes, best first.
_INSTRUCTION_SETS = ("amx_tile", "avx512_bf16", "avx512_vnni", "avx512f", "avx2", "sve", "asimd")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine, as far as it matters; two runs compare when these are equal."""

    cpu: str
    cores: int
    instructions: str
    gpu: str | None = None

    @property
    def name(self) -> str:
        """What to call it in a line of text."""
        cpu = f"{self.cores} x {self.cpu} ({self.instructions})"
        return cpu if self.gpu is None else f"{self.gpu}, {cpu}"

    @property
    def slug(self) -> str:
        """What to call it in a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @classmethod
    def here(cls) -> Hardware:
        """Describe this machine."""
        info = Path("/proc/cpuinfo")
        text = info.read_text() if info.exists() else ""
        fields = dict(re.findall(r"^(.+?)\s*:\s*(.*)$", text, re.MULTILINE))
        cpu = fields.get("model name") or platform.processor() or platform.machine()
        if "cpu family" in fields:
            cpu += f" family {fields['cpu family']} model {fields['model']}"
        known = (fields.get("flags") or fields.get("Features") or "").split()
        best = next((name for name in _INSTRUCTION_SETS if name in known), "scalar")
        return cls(cpu, len(os.sched_getaffinity(0)), best, _gpu())


@dataclass(frozen=True, slots=True)
class Record:
    """Figures by name, of one subject (ours is `inferq`) on one machine, with a UTC date."""

    subject: str
    date: str
    hardware: Hardware
    figures: Mapping[str, float]
    note: str = ""

    @classmethod
    def now(cls, figures: Mapping[str, float], note: str = "") -> Record:
        """Return a record of ours, of this machine and moment."""
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M")
        return cls("inferq", date, Hardware.here(), dict(figures), note)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Record:
        """Rebuild a record."""
        return cls(**{**entry, "hardware": Hardware(**entry["hardware"])})

    def save(self, folder: Path = RESULTS) -> Path:
        """Write the record and return its file."""
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{self.date.replace(':', '')}-{self.hardware.slug}.json"
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return file


def last_record(hardware: Hardware, folder: Path = RESULTS) -> Record | None:
    """Return the latest record of ours from such a machine."""
    files = (file for file in folder.glob("*.json") if file.name != PEERS)
    records = [Record.from_json(json.loads(file.read_text())) for file in files]
    same = [record for record in records if record.hardware == hardware]
    return max(same, key=lambda record: record.date, default=None)


def peer_records(folder: Path = RESULTS) -> list[Record]:
    """Return the peers' figures, as far as they were recorded."""
    file = folder / PEERS
    entries = json.loads(file.read_text()) if file.exists() else []
    return [Record.from_json(entry) for entry in entries]


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure beside another's: above 1 is better for us, whatever the figure's direction."""

    figure: str
    ours: float
    theirs: float
    subject: str
    is_same_hardware: bool

    @property
    def value(self) -> float:
        """How many times as good ours is."""
        if is_less_better(self.figure):
            return self.theirs / self.ours if self.ours else float("inf")
        return self.ours / self.theirs if self.theirs else float("inf")


def is_less_better(figure: str) -> bool:
    """Tell times and sizes from rates, by the figure's name."""
    return _LESS_IS_BETTER.search(figure) is not None


def ratios(record: Record, others: Iterable[Record]) -> list[Ratio]:
    """Compare each figure with those of the same name in other records.

    A figure of a quantized or otherwise special run (`W1.int8.output_tps`) is compared with a
    peer's plain one (`W1.output_tps`) where the peer has no equal.
    """
    return [
        Ratio(name, ours, theirs, other.subject, other.hardware == record.hardware)
        for name, ours in record.figures.items()
        for other in others
        if (theirs := other.figures.get(name, other.figures.get(_plain(name)))) is not None
    ]


def report(record: Record, last: Record | None, peers: Sequence[Record]) -> str:
    """Return the table that a person reads."""
    lines = [f"{record.date} on {record.hardware.name}"]
    if last is None:
        lines.append("no run is recorded for this hardware yet: RECORD=1 keeps this one")
    others = [*([] if last is None else [last]), *peers]
    found = ratios(record, others)
    width = max(map(len, record.figures), default=0)
    for name, value in record.figures.items():
        beside = [
            f"{r.value:.2f} x {'last' if r.subject == record.subject else r.subject}"
            f"{'' if r.is_same_hardware else ' (other hardware)'}"
            for r in found
            if r.figure == name
        ]
        lines.append(f"  {name:{width}}  {value:10.2f}  {', '.join(beside)}".rstrip())
    return "\n".join(lines)


def _plain(name: str) -> str:
    parts = name.split(".")
    return f"{parts[0]}.{parts[-1]}"


def _gpu() -> str | None:
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    query = [program, "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    names = found.stdout.split("\n")
    return names[0].strip() or None
