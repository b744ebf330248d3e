"""Section: the attention kernels with every tile that `tune` times; that compiles them as well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product

from triton.runtime.errors import OutOfResources, PTXASError

from gpu.check_attention import agreement
from gpu.paged_case import LLAMA, Heads
from gpu.records import Record
from gpu.section import Case, Settings, each
from inferq.kernels.triton_attention import Tuning
from inferq.kernels.triton_decode import DecodeTile
from inferq.kernels.triton_prefill import PrefillTile
from inferq.kernels.triton_schedule import SplitPolicy

#: What a tile raises that wants more of a device than there is.
UNFIT = (OutOfResources, PTXASError)
_DECODES = ((700, 1), (2999, 1), (63, 1))
_PREFILLS = ((0, 130), (300, 77))


def decode_tunings(settings: Settings) -> Mapping[str, Tuning]:
    """Give the decode tiles and splits to try, by what they are called; the likeliest first."""
    if settings.smoke:
        return {"16 tokens, 4 warps, 2 stages": Tuning(decode=DecodeTile(16, 4, 2))}
    tiles = {
        f"{tokens} tokens, {warps} warps, {stages} stages": Tuning(
            decode=DecodeTile(tokens, warps, stages),
            splits=SplitPolicy(grain=tokens),
        )
        for stages, tokens, warps in product((3, 5, 2, 4), (64, 128, 32), (4, 8))
    }
    splits = {
        f"{programs} programs a processor, {least} tokens at least": Tuning(
            splits=SplitPolicy(programs_per_processor=programs, min_tokens=least)
        )
        for programs, least in product((2, 4, 8), (256, 512))
    }
    return {**tiles, **splits}


def prefill_tunings(settings: Settings) -> Mapping[str, Tuning]:
    """Give the prefill tiles to try, by what they are called; the likeliest first."""
    if settings.smoke:
        return {"32 rows, 16 keys, 4 warps, 2 stages": Tuning(prefill=PrefillTile(32, 16, 4, 2))}
    return {
        f"{rows} rows, {keys} keys, {warps} warps, {stages} stages": Tuning(
            prefill=PrefillTile(rows, keys, warps, stages)
        )
        for stages, rows, keys, warps in product((5, 3, 2), (128, 64), (64, 128), (8, 4))
    }


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases."""
    heads = Heads(4, 2, 64) if settings.smoke else LLAMA
    decodes = ((20, 1),) if settings.smoke else _DECODES
    prefills = ((3, 17),) if settings.smoke else _PREFILLS
    for sequences, kind, tunings in (
        (decodes, "decode", decode_tunings(settings)),
        (prefills, "prefill", prefill_tunings(settings)),
    ):
        for label, tuning in tunings.items():
            name = f"{kind}: {label}"
            yield each(name, partial(_check, name, sequences, heads, tuning, settings))


def _check(
    name: str,
    sequences: tuple[tuple[int, int], ...],
    heads: Heads,
    tuning: Tuning,
    settings: Settings,
) -> Record:
    try:
        return agreement(name, sequences, heads, settings.dtype, settings.device, tuning)
    except UNFIT as error:
        return Record(name, note=f"does not fit this device: {str(error).strip().splitlines()[0]}")
