"""How events and results are printed: text for people, one JSON object a line for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferq.producer import JobResult, JobStream, StreamEvent


class _TextPrinter:
    """Prints one output as it grows; several by whole lines, each with its index before it."""

    def __init__(self, *, several: bool) -> None:
        self._several = several
        #: What was not printed yet of each output's last line; of a single one, what was.
        self._lines: dict[int, str] = {}

    def add(self, event: StreamEvent) -> None:
        if event.index > 0 and not self._several:
            self.end()  # it was not known that there are several
            self._lines.clear()
            self._several = True
        line = self._lines.get(event.index, "") + event.text
        if not self._several:
            print(event.text, end="", flush=True)
            self._lines[0] = line
            return
        *complete, self._lines[event.index] = line.split("\n")
        for text in complete:
            print(f"[{event.index}] {text}", flush=True)
        if event.finish_reason is not None:
            print(f"[{event.index}] {self._lines.pop(event.index)}", flush=True)

    def end(self) -> None:
        """End what was begun with a line break."""
        if not self._several:
            if self._lines.get(0):
                print(flush=True)
            return
        for index, line in sorted(self._lines.items()):
            if line:
                print(f"[{index}] {line}", flush=True)


def print_stream(stream: JobStream, *, as_json: bool, several: bool = False) -> None:
    """Print events as they come; end the text with a line break.

    Where `several` outputs take turns, each line begins with the index of its output.
    """
    printer = _TextPrinter(several=several)
    try:
        for event in stream:
            if as_json:
                print_json(event)
            else:
                printer.add(event)
    finally:
        printer.end()


def print_result(result: JobResult, *, as_json: bool) -> None:
    """Print a whole result: its text, or everything."""
    if as_json:
        print_json(result)
        return
    several = len(result.outputs) > 1
    for output in result.outputs:
        text = output.text
        if several:
            text = "\n".join(f"[{output.index}] {line}" for line in text.split("\n"))
        print(text, flush=True)


def print_fields(record: Any) -> None:
    """Print what is known, one `name: value` a line."""
    for name, value in _plain(record).items():
        if value is not None:
            print(f"{name}: {value}")


def print_table(rows: Sequence[Sequence[object]]) -> None:
    """Print rows of cells in columns as wide as their widest cell; the first row names them."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(line.rstrip())


def print_json(record: Any) -> None:
    """Print one JSON object on one line."""
    print(json.dumps(_plain(record), ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
