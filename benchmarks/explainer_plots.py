"""Draws the explainer's claims; see explainer.py for where the figures come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

OURS, THEIRS = "#2a78b5", "#b9b9b9"


def draw(figures: list[dict[str, Any]], folder: Path) -> None:
    """Write explainer_memory.png and explainer_time.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    by_claim = {figure["claim"]: figure for figure in figures}
    memory, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    _pages(axes[0][0], by_claim["pages on demand"])
    _waste(axes[0][1], by_claim["waste at full load"])
    prefix = by_claim["prefix sharing"]
    _pair(
        axes[1][0],
        "32 requests, common prompt of 512 tokens",
        "KV pages",
        {"apart": prefix["pages_unshared"], "shared": prefix["pages_shared"]},
    )
    _groups(axes[1][1], [f for f in figures if f["claim"].startswith("sharing within")])
    memory.savefig(folder / "explainer_memory.png", dpi=110)
    plt.close(memory)

    batching = by_claim["10, 500 and 20 tokens"]
    preemption = by_claim.get("recompute against swap")
    timing, axes = plt.subplots(1, 2 if preemption else 1, figsize=(10, 3.6), layout="constrained")
    left = axes[0] if preemption else axes
    _pair(
        left,
        "outputs of 10, 500 and 20 tokens, 3 places",
        "output tokens/s",
        {"static": batching["static_tps"], "continuous": batching["continuous_tps"]},
    )
    if preemption:
        _preemption(axes[1], preemption)
    timing.savefig(folder / "explainer_time.png", dpi=110)
    plt.close(timing)


def _pages(axis: Axes, figure: dict[str, Any]) -> None:
    tokens = sorted(t for t in figure["series"] if t >= 500)
    axis.step(tokens, [figure["series"][t] for t in tokens], where="post", color=OURS)
    axis.axvline(513, color=THEIRS, linestyle=":")
    axis.text(512.5, 32.5, "the 513th token\ntakes page 33", ha="right", va="center")
    reserved = figure["reserved_pages"]
    axis.set(
        title=f"one request: pages on demand (a reservation: {reserved})",
        xlabel="tokens",
        ylabel="KV pages of 16 tokens",
        yticks=[32, 33],
        ylim=(31.6, 33.4),
    )


def _waste(axis: Axes, figure: dict[str, Any]) -> None:
    bars = axis.bar(
        ["reserve 4,096 each", "pages"],
        [100 * figure["reserved_waste"], 100 * figure["paged_waste"]],
        color=[THEIRS, OURS],
    )
    axis.bar_label(bars, fmt="%.1f %%")
    axis.margins(y=0.12)
    axis.set(title="KV slots without a token, full load", ylabel="% of the KV cache held")


def _pair(axis: Axes, title: str, unit: str, values: dict[str, float]) -> None:
    bars = axis.bar(list(values), list(values.values()), color=[THEIRS, OURS])
    axis.bar_label(bars, fmt="%.0f")
    axis.margins(y=0.12)
    axis.set(title=title, ylabel=unit)


def _groups(axis: Axes, figures: list[dict[str, Any]]) -> None:
    names = ["n = 4", "beam width 4"]
    for offset, key, color in ((-0.2, "pages_apart", THEIRS), (0.2, "pages_together", OURS)):
        bars = axis.bar(
            [i + offset for i in range(len(figures))],
            [figure[key] for figure in figures],
            width=0.4,
            color=color,
            label=key.removeprefix("pages_"),
        )
        axis.bar_label(bars)
    axis.set_xticks(range(len(figures)), names[: len(figures)])
    axis.set(title="prompt of 512, 128 new tokens", ylabel="KV pages")
    axis.margins(y=0.3)
    axis.legend(ncols=2, loc="upper center")


def _preemption(axis: Axes, figure: dict[str, Any]) -> None:
    axis.plot(figure["tokens"], figure["recompute_ms"], color=THEIRS, marker="o", label="recompute")
    axis.plot(figure["tokens"], figure["swap_ms"], color=OURS, marker="o", label="swap")
    axis.set(title="bringing a preempted request back", xlabel="tokens", ylabel="ms", yscale="log")
    axis.legend()
