"""What the other ranks say is said by rank 0, so that all log lines of a worker have one form.

A rank writes its records to its standard error as lines of JSON; whatever else comes there, from
libraries in other languages say, is passed on as it is.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Final

_log = logging.getLogger(__name__)

#: What a line that is a record begins with.
_MARK: Final = b'{"inferq_record":'
#: Longest line that is passed on whole, in bytes.
_MAX_LINE: Final = 64 * 1024


class _RecordFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({"inferq_record": [record.levelno, record.name, super().format(record)]})


def write_records() -> None:
    """Have this process, a rank, write what is wrong for `relay`, and why it fails if it does."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RecordFormatter())
    # Rank 0 says what holds for all; of the others, only what is wrong is of interest.
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(capture=True)
    sys.excepthook = lambda *error: _log.critical("fails", exc_info=error)


def relay(stream: IO[bytes], rank: int) -> None:
    """Say what a rank writes to its standard error, until that is closed."""
    with stream:
        for line in _lines(stream.fileno()):
            level, name, text = _read(line)
            logging.getLogger(name).log(level, "rank %d: %s", rank, text)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Yield lines as they come, too long ones in pieces; holds no buffered reader's lock."""
    rest = b""
    while data := os.read(descriptor, _MAX_LINE):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
        if len(rest) >= _MAX_LINE:
            yield rest
            rest = b""
    if rest:
        yield rest


def _read(line: bytes) -> tuple[int, str, str]:
    if line.startswith(_MARK):
        try:
            level, name, text = json.loads(line)["inferq_record"]
            return int(level), str(name), str(text)
        except (ValueError, TypeError):
            pass  # something that only looks like one, or is longer than a line may be
    return logging.WARNING, __name__, line.decode(errors="replace").rstrip()
