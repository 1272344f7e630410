"""docs/paper.md and its pictures. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.paper.models import I_AND_C, N_AND_D, W_AND_S, Setting
from bench.paper.systems import Result

GIB = 1 << 30
OPERATOR, BLOCK, BASE = "FSDP per operator", "FSDP per block", "OSDP, no splitting"
SPLIT, TENSOR = "OSDP without tp", "OSDP"
OPERATOR_AGAIN, BLOCK_AGAIN = "FSDP per operator, recomputed", "FSDP per block, recomputed"
SPLIT_AGAIN, AGAIN = "OSDP without tp, recomputation chosen", "OSDP, recomputation chosen"
PLAIN_SYSTEMS = (OPERATOR, BLOCK, BASE, SPLIT, TENSOR)
RECOMPUTING = (OPERATOR_AGAIN, BLOCK_AGAIN, SPLIT_AGAIN, AGAIN)
FAMILIES = (N_AND_D, W_AND_S, I_AND_C)
BEST_FSDP = "best FSDP"
COMPARED = (
    (BASE, OPERATOR),
    (SPLIT, OPERATOR),
    (TENSOR, OPERATOR),
    (TENSOR, BLOCK),
    (SPLIT_AGAIN, OPERATOR_AGAIN),
    (AGAIN, OPERATOR_AGAIN),
    (SPLIT_AGAIN, BEST_FSDP),
    (AGAIN, BEST_FSDP),
)
EVERY = "all"

PAPER: dict[tuple[str, str], str] = {
    (N_AND_D, BASE): "+17.2%",
    (N_AND_D, SPLIT): "+22%",
    (W_AND_S, SPLIT): "+50%, max +92%",
    (I_AND_C, BASE): "+10%",
    (I_AND_C, SPLIT): "+24%",
    (EVERY, SPLIT_AGAIN): "+52.9%, max +108.3%",
}
"""Speedups over FSDP that the paper reports: means, unless they say otherwise."""

COLOURS = ("#9ecae1", "#4292c6", "#fdae6b", "#f16913", "#a63603", "#c7e9c0", "#74c476", "#238b45", "#00441b")


@dataclass(frozen=True)
class Row:
    """One setting under one memory limit."""

    setting: Setting
    num_parameters: int
    limit_bytes: int
    results: dict[str, Result | None]

    def best(self, system: str) -> Result | None:
        """Of that system, or of all that ``BEST_FSDP`` stands for; None if nothing fits."""
        names = (OPERATOR, BLOCK, OPERATOR_AGAIN, BLOCK_AGAIN) if system == BEST_FSDP else (system,)
        found = [one for name in names if (one := self.results[name]) is not None]
        return max(found, key=lambda one: one.samples_per_s, default=None)

    def gain(self, system: str, over: str) -> float | None:
        """Relative; None if either does not fit."""
        one, other = self.best(system), self.best(over)
        return one.samples_per_s / other.samples_per_s - 1 if one and other else None


@dataclass(frozen=True)
class Scenario:
    """All settings under one set of assumptions."""

    title: str
    rows: tuple[Row, ...]
    sequences: int
    """In a batch of 1."""


def write(scenarios: Sequence[Scenario], headline: Row, template: str, docs: Path) -> Path:
    """The page from ``template``, whose names in braces are filled in; returns it."""
    main = scenarios[0]
    folder = docs / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    for family in FAMILIES:
        picture(main, family, folder / f"{_stem(family)}.svg")
    page = docs / "paper.md"
    page.write_text(
        template.format(
            summary="\n".join(summary(main)),
            plain="\n".join(table(main, PLAIN_SYSTEMS, OPERATOR)),
            recomputed="\n".join(table(main, RECOMPUTING, OPERATOR_AGAIN)),
            scenarios="\n\n".join(f"### {one.title}\n\n" + "\n".join(summary(one)) for one in scenarios[1:]),
            pictures="\n".join(f"![{family}](paper/{_stem(family)}.svg)" for family in FAMILIES),
            headline=_headline(headline, main.sequences),
        )
    )
    return page


def summary(scenario: Scenario) -> list[str]:
    """Speedups over FSDP by family, beside the paper's."""
    lines = []
    for family in (*FAMILIES, EVERY):
        rows = [row for row in scenario.rows if family in (row.setting.family, EVERY)]
        for system, over in COMPARED:
            gains = [gain for row in rows if (gain := row.gain(system, over)) is not None]
            lost = sum(row.best(over) is None and row.best(system) is not None for row in rows)
            reported = PAPER.get((family, system), "") if over in (OPERATOR, OPERATOR_AGAIN) else ""
            lines.append((family, f"{system} / {over}", _mean(gains), _most(gains), str(lost or ""), reported))
    names = ("models", "speedup of", ">mean", ">most", ">trains, the other does not", "paper")
    return markdown(names, lines)


def table(scenario: Scenario, systems: Sequence[str], baseline: str) -> list[str]:
    """Sequences per second, batch size in brackets, and the gain over the baseline."""
    lines = []
    for row in scenario.rows:
        cells = [_cell(row, system, baseline, scenario.sequences) for system in systems]
        lines.append(
            (
                row.setting.family,
                row.setting.name,
                f"{row.num_parameters / 1e9:.2f} B",
                f"{row.limit_bytes / GIB:.0f} GiB",
                *cells,
            )
        )
    return markdown(("family", "layers x width", ">parameters", ">limit", *(f">{one}" for one in systems)), lines)


def picture(scenario: Scenario, family: str, file: Path) -> None:
    """Sequences per second by setting and system, a panel for each limit; a cross where nothing fits."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in scenario.rows if row.setting.family == family]
    limits = sorted({row.limit_bytes for row in rows})
    figure = Figure(figsize=(10, 3.0 * len(limits) + 0.6), layout="constrained")
    panels = figure.subplots(len(limits), 1, squeeze=False)[:, 0]
    systems = (*PLAIN_SYSTEMS, *RECOMPUTING)
    width = 0.86 / len(systems)
    for axes, limit in zip(panels, limits, strict=True):
        own = [row for row in rows if row.limit_bytes == limit]
        for index, system in enumerate(systems):
            found = [row.results[system] for row in own]
            places = [group + (index - (len(systems) - 1) / 2) * width for group in range(len(own))]
            heights = [one.samples_per_s * scenario.sequences if one else 0.0 for one in found]
            axes.bar(places, heights, width, label=system, color=COLOURS[index], edgecolor="black", linewidth=0.4)
            for place, one in zip(places, found, strict=True):
                if one is None:
                    axes.text(place, 0, "x", ha="center", va="bottom", fontsize=8, color="firebrick")
        axes.set_title(f"{family}, {limit / GIB:.0f} GiB", fontsize=10)
        axes.set_ylabel("sequences/s")
        axes.set_xticks(range(len(own)), [row.setting.name for row in own], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    with matplotlib.rc_context({"svg.hashsalt": "paper"}):  # the same picture has the same bytes
        figure.savefig(file, metadata={"Date": None})


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table; a column whose title starts with ``>`` holds numbers."""
    rule = ["---:" if name.startswith(">") else "---" for name in names]
    titles = [name.removeprefix(">") for name in names]
    return [f"| {' | '.join(row)} |" for row in (titles, rule, *rows)]


def _cell(row: Row, system: str, baseline: str, sequences: int) -> str:
    one, gain = row.results[system], row.gain(system, baseline)
    if one is None:
        return "does not fit"
    more = f" {_percent(gain)}" if gain is not None and system != baseline else ""
    return f"{one.samples_per_s * sequences:,.0f} ({one.batch_size}){more}"


def _mean(gains: Sequence[float]) -> str:
    return _percent(sum(gains) / len(gains)) if gains else "-"


def _most(gains: Sequence[float]) -> str:
    return _percent(max(gains)) if gains else "-"


def _percent(gain: float) -> str:
    return f"{round(gain, 3) + 0.0:+.1%}"  # no negative zero


def _headline(row: Row, sequences: int) -> str:
    found = [(system, one) for system, one in row.results.items() if one is not None]
    lost = [system for system, one in row.results.items() if one is None]
    rates = [f"{system} {one.samples_per_s * sequences:,.0f} sequences/s" for system, one in found]
    return f"{'; '.join(rates) or 'none'}. Without room: {'; '.join(lost) or 'none'}"


def _stem(family: str) -> str:
    return family.lower().replace("&", "-and-")
