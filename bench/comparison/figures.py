"""Pictures in the style of the paper's figure 5: samples per second by system, grouped by memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.comparison.cells import MIB
from bench.comparison.jobs import SETTINGS
from bench.comparison.systems import BASES, OSDP
from bench.comparison.tournament import Comparison, Row

COLORS = ("#9ecae1", "#4292c6", "#a1d99b", "#41ab5d", "#dadaeb", "#807dba", "#bdbdbd", "#d94801")
"""Of the competitors, in pairs of a kind, and of OSDP."""


def draw(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """One picture for each model: a panel for each setting, a group of bars for each limit. Returns the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "throughput"  # the same picture has the same bytes
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for model, group in groupby(comparisons, key=lambda c: c.cell.model):
        own = list(group)
        settings = list(dict.fromkeys(c.cell.setting for c in own))
        columns = min(3, len(settings))
        rows = -(-len(settings) // columns)
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.6 * columns, 2.7 * rows + 0.9), squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(settings) :]:
            axis.set_visible(False)
        for axis, setting in zip(axes.flat, settings, strict=False):
            panel(axis, SETTINGS[setting].label, [c for c in own if c.cell.setting == setting])
        handles, labels = axes.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
        figure.suptitle(f"{model}: samples per second, each system at its best batch size", fontsize=10)
        file = folder / f"{model}.svg"
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)
        files.append(file)
    return files


def panel(axis: Any, title: str, comparisons: Sequence[Comparison]) -> None:
    """One setting. A cross stands where nothing of a system trains; hatched bars are upper bounds."""
    ordered = sorted(comparisons, key=lambda c: c.cell.memory_bytes)
    systems = [*BASES, OSDP]
    shown = [base for base in systems if any(_has(c, base) for c in ordered)]
    width = 0.84 / len(shown)
    for index, base in enumerate(shown):
        places = [group + (index - (len(shown) - 1) / 2) * width for group in range(len(ordered))]
        rows = [best_of(comparison, base) for comparison in ordered]
        heights = [row.samples_per_s if row else 0.0 for row in rows]
        label = "OSDP" if base == OSDP else BASES[base]
        color = COLORS[systems.index(base)]
        bars = axis.bar(places, heights, width, label=label, color=color, edgecolor="black", lw=0.4)
        for bar, row, place in zip(bars, rows, places, strict=True):
            if row and row.status == "bounded":
                bar.set_hatch("////")
            if not row:
                axis.text(place, 0, "x", ha="center", va="bottom", fontsize=7, color="firebrick")
    axis.set_title(title, fontsize=9)
    axis.set_xticks(range(len(ordered)), [f"{c.cell.memory_bytes / MIB:.0f} MiB" for c in ordered], fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def best_of(comparison: Comparison, base: str) -> Row | None:
    """The best variant of a base that was run, else the largest upper bound; None if none trains."""
    rows = [row for row in comparison.rows if row.system.split("+")[0] == base]
    for status in ("ok", "bounded"):
        known = [row for row in rows if row.status == status]
        if known:
            return max(known, key=lambda row: row.samples_per_s)
    return None


def _has(comparison: Comparison, base: str) -> bool:
    return any(row.system.split("+")[0] == base for row in comparison.rows)
