"""Quantizes a Llama to AWQ's tensors so that its answers stay: the calibrated test packer.

Layer by layer, the weights of four bits are chosen to give, from what the quantized layers before
hand on, what the plain model has there (GPTQ, Frantar et al. 2022, with the plain model's outputs
as targets). Columns are rounded from the most active on, each with its error made up for by those
that follow; then the scales of each row are solved for by least squares.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

#: Shares of a matrix's mean diagonal that are added to it: against columns that hardly occur, and
#: against fitting the noise of a short text.
DAMPING = 0.01
TARGET_DAMPING = 1.0
#: Shares of a group's range that are tried for its 16 values.
RANGES = tuple(1 - 0.05 * step for step in range(8))
#: How often a line is laid through the best values so far.
LINES = 2
#: Of the median length of an input: what a longer one counts as. A text's first token, which others
#: attend to where they look for nothing, is a hundred times as long, and would be all that counts.
LOUDEST = 4.0
#: Columns after which the error is handed on to all others at once.
BLOCK = 64

#: A tensor in the plain model, and the same in the quantized one.
Both = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight [N, K] as values from 0 to 15, with zeros and scales [N, K / group]."""

    values: Tensor
    zeros: Tensor
    scales: Tensor

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.zeros.shape[1]

    def steps(self) -> Tensor:
        """Return how many scales each weight is."""
        return self.values - self.zeros.repeat_interleave(self.group, dim=1)

    def weight(self) -> Tensor:
        return self.steps() * self.scales.repeat_interleave(self.group, dim=1)


@torch.inference_mode()
def quantized_llama(
    folder: Path, texts: Sequence[Sequence[int]], group: int
) -> Iterator[tuple[str, Rounded]]:
    """Yield the name of each projection and what it is rounded to, given texts of one length."""
    config = json.loads((folder / "config.json").read_text())
    model = _Llama(load_file(folder / "model.safetensors"), config, torch.tensor(texts))
    for layer in range(config["num_hidden_layers"]):
        yield from model.layer(f"model.layers.{layer}.", group)


class _Llama:
    """Runs the plain model and the quantized one side by side."""

    def __init__(self, tensors: dict[str, Tensor], config: dict[str, Any], tokens: Tensor) -> None:
        self._tensors = {name: tensor.float() for name, tensor in tensors.items()}
        self._heads = config["num_attention_heads"]
        self._eps = config["rms_norm_eps"]
        embedded = self._tensors["model.embed_tokens.weight"][tokens]
        self._stream: Both = (embedded, embedded)
        size = config["hidden_size"] // self._heads
        frequencies = config["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._size = size

    def layer(self, prefix: str, group: int) -> Iterator[tuple[str, Rounded]]:
        """Quantize the projections of a layer, and compute it."""
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        normed = self._norms(f"{prefix}input_layernorm.weight")
        names = [f"{attention}{name}_proj" for name in "qkv"]
        parts = yield from self._products(names, normed, group)
        plain, rounded = (self._attend(*each) for each in zip(*parts, strict=True))
        yield from self._added(f"{attention}o_proj", (plain, rounded), group)
        normed = self._norms(f"{prefix}post_attention_layernorm.weight")
        gate, up = yield from self._products([f"{mlp}gate_proj", f"{mlp}up_proj"], normed, group)
        plain, rounded = (silu(a) * b for a, b in zip(gate, up, strict=True))
        yield from self._added(f"{mlp}down_proj", (plain, rounded), group)

    def _products(
        self, names: Sequence[str], inputs: Both, group: int, missing: Tensor | None = None
    ) -> Generator[tuple[str, Rounded], None, list[Both]]:
        """Quantize projections with the same inputs; return the outputs of each.

        `missing` is what the quantized outputs should have beyond the plain ones.
        """
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        plain, rounded_in = (x.flatten(0, 1) for x in inputs)
        loudness = rounded_in.norm(dim=1, keepdim=True)
        share = (LOUDEST * loudness.median() / loudness).clamp(max=1)
        counted = rounded_in * share
        products = counted.T @ counted
        error = counted.T @ ((plain - rounded_in) * share) @ weight.T
        if missing is not None:
            error += counted.T @ (missing.flatten(0, 1) * share)
        change = torch.linalg.solve(_damped(products, TARGET_DAMPING), error)
        rounded = round_weight(weight + change.T, products, group)
        outputs = (inputs[0] @ weight.T, inputs[1] @ rounded.weight().T)
        sizes = [len(self._tensors[f"{name}.weight"]) for name in names]
        parts = (x.split(sizes) for x in (rounded.values, rounded.zeros, rounded.scales))
        for name, *tensors in zip(names, *parts, strict=True):
            yield name, Rounded(*tensors)
        return list(zip(*(x.split(sizes, dim=-1) for x in outputs), strict=True))

    def _added(self, name: str, inputs: Both, group: int) -> Iterator[tuple[str, Rounded]]:
        """Quantize a projection whose outputs are added to the stream, with the error it has."""
        missing = self._stream[0] - self._stream[1]
        [(plain, rounded)] = yield from self._products([name], inputs, group, missing)
        self._stream = (self._stream[0] + plain, self._stream[1] + rounded)

    def _norms(self, name: str) -> Both:
        plain, rounded = (
            rms_norm(x, x.shape[-1:], self._tensors[name], self._eps) for x in self._stream
        )
        return plain, rounded

    def _attend(self, *parts: Tensor) -> Tensor:
        query, key, value = (x.unflatten(-1, (-1, self._size)).transpose(1, 2) for x in parts)
        attended = scaled_dot_product_attention(
            self._turn(query), self._turn(key), value, is_causal=True, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(2)

    def _turn(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * self._cos + torch.cat([-second, first], dim=-1) * self._sin


def round_weight(weight: Tensor, products: Tensor, group: int) -> Rounded:
    """Round a weight [N, K], given the sums of products of its inputs [K, K]."""
    zeros, scales = _grids(weight, products.diagonal(), group)
    rounded = Rounded(_rounded_in_turn(weight, products, zeros, scales, group), zeros, scales)
    solved = Rounded(rounded.values, zeros, _best_scales(weight, products, rounded))
    is_better = _error(weight, products, solved) < _error(weight, products, rounded)
    return Rounded(rounded.values, zeros, torch.where(is_better[:, None], solved.scales, scales))


def _grids(weight: Tensor, importance: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return zeros and scales [N, K / group] with the least error found.

    Of several ranges the best one comes first, then lines through the values that it gives.
    """
    grouped = weight.unflatten(1, (-1, group))
    importance = importance.view(-1, group)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    best = (torch.full_like(low, torch.inf), low, high)
    for share in RANGES:
        scales = _half((high - low) * share / 15)
        zeros = (-low * share / scales).round().clamp(0, 15)
        best = _better(best, grouped, importance, zeros, scales)
    for _ in range(LINES):
        values = _values(grouped, *best[1:])
        best = _better(best, grouped, importance, *_line(grouped, values, importance, best[2]))
    return best[1:]


def _better(
    best: tuple[Tensor, Tensor, Tensor],
    grouped: Tensor,
    importance: Tensor,
    zeros: Tensor,
    scales: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each group's least error with its zero and scale, of the best and these."""
    values = _values(grouped, zeros, scales)
    values.sub_(zeros[..., None]).mul_(scales[..., None]).sub_(grouped)
    error = (values.square_() * importance).sum(2)
    is_less = error < best[0]
    pairs = zip((error, zeros, scales), best, strict=True)
    least, best_zeros, best_scales = (torch.where(is_less, *pair) for pair in pairs)
    return least, best_zeros, best_scales


def _values(grouped: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    return (grouped / scales[..., None]).add_(zeros[..., None]).round_().clamp_(0, 15)


def _line(
    grouped: Tensor, values: Tensor, importance: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Return zeros and scales of the line through each group's weights over its values."""
    share = importance / importance.sum(1, keepdim=True)
    mean_weight, mean_value = (grouped * share).sum(2), (values * share).sum(2)
    centred = (values - mean_value[..., None]).mul_(share)
    variance = (centred * values).sum(2)
    slope = (centred * grouped).sum(2) / variance.clamp(min=1e-9)
    scales = _half(torch.where(slope > 0, slope, scales))
    return (mean_value - mean_weight / scales).round().clamp(0, 15), scales


def _half(scales: Tensor) -> Tensor:
    return scales.clamp(min=1e-5).half().float()


def _rounded_in_turn(
    weight: Tensor, products: Tensor, zeros: Tensor, scales: Tensor, group: int
) -> Tensor:
    """Round column after column, the most active first, and make up for each one's error."""
    order = products.diagonal().argsort(descending=True)
    groups = order // group
    left = weight.T[order]  # [K, N]
    zeros, scales = zeros.T[groups], scales.T[groups]
    lower = torch.linalg.cholesky(_damped(products, DAMPING)[order][:, order])
    upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    values = torch.empty_like(left)
    for first in range(0, len(left), BLOCK):
        block = slice(first, first + BLOCK)
        errors = torch.empty_like(left[block])
        factors = upper[block, block]
        for row in range(len(errors)):
            k = first + row
            torch.addcdiv(zeros[k], left[k], scales[k], out=values[k]).round_().clamp_(0, 15)
            torch.sub(left[k], (values[k] - zeros[k]) * scales[k], out=errors[row])
            errors[row] /= factors[row, row]
            left[k + 1 : first + BLOCK] -= factors[row, row + 1 :, None] * errors[row]
        left[first + BLOCK :] -= upper[block, first + BLOCK :].T @ errors
    return values[order.argsort()].T.contiguous()


def _best_scales(weight: Tensor, products: Tensor, rounded: Rounded) -> Tensor:
    """Return the scales [N, K / group] with the least error for these values."""
    steps, group = rounded.steps(), rounded.group
    right = ((weight @ products) * steps).unflatten(1, (-1, group)).sum(2)
    parts = zip(steps.split(group, dim=1), products.split(group), strict=True)
    rows = [((part @ rows) * steps).unflatten(1, (-1, group)).sum(2) for part, rows in parts]
    left = torch.stack(rows, dim=1)
    left.diagonal(dim1=1, dim2=2).mul_(1 + 1e-4).add_(1e-9)
    solved = torch.linalg.solve(left, right[..., None])[..., 0].half().float()
    return torch.where(solved > 0, solved, rounded.scales)


def _error(weight: Tensor, products: Tensor, rounded: Rounded) -> Tensor:
    difference = weight - rounded.weight()
    return ((difference @ products) * difference).sum(1)


def _damped(products: Tensor, share: float) -> Tensor:
    return products + share * products.diagonal().mean() * torch.eye(len(products))
