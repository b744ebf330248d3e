"""Section: random bits, noise and sampled tokens against torch's forms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu import interpreter
from gpu.records import Quantity, Record, Target
from gpu.section import Case, Settings, each
from inferq.kernels.gumbel import gumbel_noise, philox
from inferq.kernels.sampling import SampledTokens, sample_tokens

#: Two logarithms, each within a few units in the last place.
NOISE_TOLERANCE = 1e-5
#: In the order of `sample_tokens`.
PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seed", "child", "position")


def cases(settings: Settings) -> Iterable[Case]:
    """Give the cases."""
    interpreter.complete()
    yield each("Philox: the device's integers are the host's", lambda: _bits(settings))
    yield each("noise of whole rows", lambda: _noise(settings, whole=True))
    yield each("noise of single tokens", lambda: _noise(settings, whole=False))
    kinds = ("greedy", "plain", "min_p", "top_k", "top_p", "all of them", "mixed rows")
    for kind in kinds:
        yield each(f"tokens: {kind}", partial(_tokens, kind, settings))
    yield each("tokens: rows that are not finite are told", lambda: _broken(settings))


def _keys(settings: Settings, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    children = torch.randint(0, 8, (rows,), generator=generator)
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    return tuple(key.to(settings.device) for key in (seeds, children, positions))  # type: ignore[return-value]


def _bits(settings: Settings) -> Record:
    count = 1 << (8 if settings.smoke else 20)
    seeds, children, positions = _keys(settings, count)
    found = torch.stack(philox(seeds, positions * 7, positions, children))
    host = [key.cpu() for key in (seeds, positions * 7, positions, children)]
    different = int((found.cpu() != torch.stack(philox(*host))).sum())
    return Record(
        "Philox: the device's integers are the host's",
        {"words": Quantity(found.numel()), "different": Quantity(different)},
        Target("different", at_most=0),
    )


def _noise(settings: Settings, *, whole: bool) -> Record:
    from inferq.kernels import triton_gumbel

    rows, vocab = (3, 77) if settings.smoke else (32, 128_256)
    keys = _keys(settings, rows)
    seeds, children, positions = (key.cpu() for key in keys)
    if whole:
        found = triton_gumbel.vocabulary_noise(*keys, vocab)
        expected = gumbel_noise(seeds, children, positions, vocab_size=vocab)
    else:
        ids = torch.randint(0, vocab, (rows, 50))
        found = triton_gumbel.token_noise(*keys, ids.to(settings.device))
        expected = gumbel_noise(seeds, children, positions, ids)
    error = ((found.cpu() - expected).abs() / expected.abs().clamp_min(1.0)).max()
    # Every value comes from one of 2^23 uniforms: any wrong bit shows as a large error.
    return Record(
        f"noise of {'whole rows' if whole else 'single tokens'}",
        {"error": Quantity(float(error), "largest relative")},
        Target("error", at_most=NOISE_TOLERANCE),
    )


def sampling_parameters(kind: str, rows: int, settings: Settings) -> dict[str, Tensor]:
    """Make up the rows' parameters; "mixed rows" has every kind beside each other."""
    seeds, children, positions = _keys(settings, rows)
    device, index = settings.device, torch.arange(rows, device=settings.device)
    mixed = kind == "mixed rows"

    def column(asked: bool, values: Tensor, off: float) -> Tensor:
        default = torch.full((rows,), off, dtype=values.dtype, device=device)
        if mixed:
            return torch.where(torch.rand(rows, device=device) < 0.5, values, default)
        return values if asked else default

    ones = torch.ones(rows, device=device)
    every = kind == "all of them"
    return {
        "temperature": column(kind != "greedy", 0.3 + 0.1 * (index % 10), 0.0).float(),
        "top_k": column(every or kind == "top_k", 1 + index * 7 % 300, 0),
        "top_p": column(every or kind == "top_p", 0.99 - 0.03 * (index % 30), 1.0).float(),
        "min_p": column(every or kind == "min_p", 0.02 * ones, 0.0).float(),
        "seed": seeds,
        "child": children,
        "position": positions,
    }


def _tokens(kind: str, settings: Settings) -> Record:
    rows, vocab, padded = (4, 90, 96) if settings.smoke else (48, 128_256, 128_320)
    logits = 3 * torch.randn(rows, padded, device=settings.device)
    logits = (logits * 16).round() / 16  # ties, as 16-bit logits have them
    parameters = sampling_parameters(kind, rows, settings)
    columns = [parameters[name] for name in PARAMETERS]
    found = sampled(logits, columns, vocab)
    expected = sampled(logits.cpu(), [column.cpu() for column in columns], vocab)
    different = int((found.token_ids.cpu() != expected.token_ids).sum())
    return Record(
        f"tokens: {kind}",
        {"rows": Quantity(rows), "different": Quantity(different)},
        Target("different", at_most=0),
    )


def sampled(
    logits: Tensor,
    columns: Sequence[Tensor],
    vocab_size: int,
    *,
    with_draws: bool = True,
    with_top_k: bool = True,
    with_top_p: bool = True,
) -> SampledTokens:
    """Sample with the columns that `PARAMETERS` names."""
    temperature, top_k, top_p, min_p, seed, child, position = columns
    return sample_tokens(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        seed,
        child,
        position,
        vocab_size,
        with_draws=with_draws,
        with_top_k=with_top_k,
        with_top_p=with_top_p,
    )


def _broken(settings: Settings) -> Record:
    rows, vocab = 4, 96 if settings.smoke else 128_256
    logits = torch.randn(rows, vocab, device=settings.device)
    logits[1, 5] = torch.nan
    logits[2, :] = -torch.inf
    columns = [sampling_parameters("plain", rows, settings)[name] for name in PARAMETERS]
    found = sampled(logits, columns, vocab)
    tokens, finite = found.token_ids, found.highest.isfinite().tolist()
    inside = bool(((tokens >= 0) & (tokens < vocab)).all())
    return Record(
        "tokens: rows that are not finite are told",
        {"right": Quantity(inside and finite == [True, False, False, True])},
        Target("right", at_least=1),
    )
