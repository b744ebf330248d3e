"""How events and results are printed: text for people, one JSON object a line for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferq.producer import JobResult, JobStream


def print_stream(stream: JobStream, *, as_json: bool) -> None:
    """Print events as they come; end the text with a line break."""
    wrote_text = False
    try:
        for event in stream:
            if as_json:
                print_json(event)
            else:
                print(event.text, end="", flush=True)
                wrote_text = wrote_text or bool(event.text)
    finally:
        if wrote_text:
            print(flush=True)


def print_result(result: JobResult, *, as_json: bool) -> None:
    """Print a whole result: its text, or everything."""
    if as_json:
        print_json(result)
        return
    for output in result.outputs:
        print(output.text, flush=True)


def print_fields(record: Any) -> None:
    """Print what is known, one `name: value` a line."""
    for name, value in _plain(record).items():
        if value is not None:
            print(f"{name}: {value}")


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
