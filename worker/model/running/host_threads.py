"""How torch's threads wait for each other; to be set before torch is first imported."""

from __future__ import annotations

import os
from typing import Final

#: Turns of GNU OpenMP's waiting loop before a thread sleeps, some 20 us; its own choice is 5 ms.
_SPIN_COUNT: Final = "1000"


def share_cores() -> None:
    """Let a waiting thread sleep soon, so that other processes on the same cores can run.

    A decode step waits for its threads about 500 times. While another process holds one of the
    cores, each wait that spins lasts a whole slice of the system's scheduler. SmolLM2-135M,
    float32, 2 cores: batch 1 falls from 27 to 25 tokens/s on an idle machine and rises from 2 to
    12 beside three busy processes; batch 32 from 376 to 358, and from 35 to 180. With the native
    kernels, one thread works for some 30 us between two waits, and waiting for longer gains
    nothing where nothing else gets the cores first (1000 turns: 58 and 59 tokens/s, 20000: 47 and
    56), but gives less than 2 instead of 14 on a shared machine under load (4000 turns: 8). The
    user's own `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
