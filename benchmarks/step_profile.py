"""Where a step's time goes, without a change to the code that is measured.

A timer signal interrupts the engine's thread about a thousand times a second; the time since the
last interruption is booked on the kind of work that its stack shows. A call into native code is
interrupted when it returns, and gets all of its time.
"""

from __future__ import annotations

import re
import signal
import time
from collections import defaultdict
from types import FrameType, TracebackType
from typing import Any, Final, Self

PERIOD_S: Final = 0.001

#: Kinds of work by the file of the innermost frame that says it; the first match counts.
KINDS: Final = (
    (
        "matrix products",
        r"kernels/(matmul\w*|awq|triton_awq)\.py|worker/model/architecture/linear\.py",
    ),
    ("attention", r"kernels/(\w*attention\w*|triton_(decode|prefill|kv_write|pages))\.py"),
    ("norms, rotary, activations", r"kernels/(triton_)?(norm|rotary|activation)\.py"),
    (
        "sampling",
        r"kernels/(triton_)?(sampling|gumbel)\.py"
        r"|worker/engine/(sampling/\w+|requests/token_parameters)\.py",
    ),
    ("input preparation", r"worker/model/running/(step_inputs|asked|block_moves|kv_cache)\.py"),
    ("rest of the model", r"worker/model/(\w+/)?\w+\.py"),
    ("scheduling", r"worker/engine/(\w+/)?\w+\.py"),
    ("I/O", r"worker/(queue/)?\w+\.py|producer/\w+\.py|protocol/\w+\.py|benchmarks/\w+\.py"),
)
_PATTERNS: Final = tuple((kind, re.compile(rf"(^|/)({pattern})$")) for kind, pattern in KINDS)
OTHER: Final = "other"


class StepProfile:
    """A context manager; to be used on the main thread, where signals arrive."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._kinds: dict[str, str | None] = {}
        self._last = 0.0

    def __enter__(self) -> Self:
        self._last = time.perf_counter()
        self._before = signal.signal(signal.SIGALRM, self._on_signal)
        signal.setitimer(signal.ITIMER_REAL, PERIOD_S, PERIOD_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind of work in the time profiled."""
        total = sum(self._seconds.values())
        kinds = [kind for kind, _ in KINDS] + [OTHER]
        return {kind: self._seconds[kind] / total if total else 0.0 for kind in kinds}

    def figures(self) -> dict[str, Any]:
        """Return what goes into one JSON line."""
        return {
            "profile_s": round(sum(self._seconds.values()), 3),
            "shares": {kind: round(share, 4) for kind, share in self.shares.items()},
        }

    def table(self) -> str:
        """Return the shares to be read."""
        rows = sorted(self.shares.items(), key=lambda item: -item[1])
        return "\n".join(f"  {kind:28} {100 * share:5.1f} %" for kind, share in rows)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        now = time.perf_counter()
        self._seconds[self._kind_of(frame)] += now - self._last
        self._last = now

    def _kind_of(self, frame: FrameType | None) -> str:
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in self._kinds:
                self._kinds[name] = next((k for k, p in _PATTERNS if p.search(name)), None)
            if (kind := self._kinds[name]) is not None:
                return kind
            frame = frame.f_back
        return OTHER
