"""Section: the attention kernels with other tiles than the tables', to find better ones.

`run.sh --only check_tiles,tune` runs it by itself; in a whole run it takes what time is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from gpu.check_tiles import UNFIT, decode_tunings, prefill_tunings
from gpu.decode_speed import Cache
from gpu.decode_speed import measure as measure_decode
from gpu.paged_case import LLAMA, Heads
from gpu.prefill_speed import Rates
from gpu.prefill_speed import measure as measure_prefill
from gpu.records import Quantity, Record
from gpu.section import Case, Settings
from inferq.kernels.triton_attention import Tuning

_BEST = 3


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases: the shapes that the tables' choices are made for."""
    heads = Heads(4, 2, 64) if settings.smoke else LLAMA
    cache, rates = Cache(settings, heads), Rates(settings)
    decodes = {"batch 64, context 4096": [4096] * 64, "batch 1, context 32768": [32768]}
    prefills = {"prompt of 4096": [(0, 4096)], "4 of 512 after 8192": [(8192, 512)] * 4}
    if settings.smoke:
        decodes, prefills = {"tiny": [24]}, {"tiny prompt": [(0, 9)]}
    left = len(decodes) + len(prefills)
    for name, lens in decodes.items():

        def decode(tuning: Tuning | None, lens: list[int] = lens) -> Record:
            return measure_decode("", lens, cache, settings, tuning=tuning)

        yield _sweep(f"decode: {name}", decode, decode_tunings(settings), settings, left)
        left -= 1
    for name, sequences in prefills.items():

        def prefill(tuning: Tuning | None, sequences: list[tuple[int, int]] = sequences) -> Record:
            return measure_prefill("", sequences, heads, rates, settings, tuning=tuning)

        yield _sweep(f"prefill: {name}", prefill, prefill_tunings(settings), settings, left)
        left -= 1


def _sweep(
    name: str,
    measure: Callable[[Tuning | None], Record],
    tunings: Mapping[str, Tuning],
    settings: Settings,
    sweeps_left: int,
) -> Case:
    """Make the case that tries all and names the best beside the tables' choice."""

    def run() -> Iterator[Record]:
        reserved = settings.seconds_left * (1 - 1 / sweeps_left)
        chosen = _microseconds(measure(None))
        found: dict[str, float] = {}
        for label, tuning in tunings.items():
            if settings.seconds_left <= reserved:
                break
            try:
                found[label] = _microseconds(measure(tuning))
            except UNFIT:  # the section check_tiles says so
                continue
        best = sorted(found, key=found.__getitem__)[:_BEST]
        yield Record(
            name,
            {"the tables' choice": Quantity(chosen, "us")}
            | {label: Quantity(found[label], "us") for label in best},
            note=f"{len(found)} of {len(tunings)} tried",
        )

    return Case(name, run)


def _microseconds(record: Record) -> float:
    time = record.quantities["time"].value
    assert isinstance(time, float)
    return time
