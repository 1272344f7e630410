"""Comparisons as tables and as JSON, and what they add up to. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean, geometric_mean
from typing import Any

from rich.table import Table

from bench.comparison.cells import MIB, Cell
from bench.comparison.models import MODELS, PAPERS_FAMILIES
from bench.comparison.systems import NO_TP, OSDP, OWN, parse
from bench.comparison.tournament import PAPER, Comparison, Row


@dataclass(frozen=True)
class Versus:
    """OSDP's samples per second over those of another, over some cells."""

    what: str
    ratios: tuple[float, ...]

    def words(self) -> tuple[str, ...]:
        """As ``HEADINGS`` after the first."""
        numbers = (min(self.ratios), geometric_mean(self.ratios), fmean(self.ratios), max(self.ratios))
        return (str(len(self.ratios)), *(f"{number:.2f}" for number in numbers))


HEADINGS = ("", "cells", "least", "geometric mean", "average", "most")
"""Of ``Versus``. The paper's own figures are averages."""


def ratio(comparison: Comparison, other: Row | None) -> float | None:
    """OSDP over another, where both train."""
    if other is None or other.status != "ok" or comparison.osdp.status != "ok":
        return None
    return comparison.osdp.samples_per_s / other.samples_per_s


def cell_table(comparison: Comparison) -> Table:
    """All systems of a cell, best first."""
    table = Table(title=comparison.cell.label, title_justify="left", title_style="bold")
    for name in ("system", "batch size", "samples/s", "OSDP is", "peak memory", ""):
        table.add_column(name, justify="left" if name in ("system", "") else "right")
    for row in comparison.rows:
        table.add_row(*row_words(comparison, row), style="bold" if row.system == OSDP else "")
    return table


def row_words(comparison: Comparison, row: Row) -> tuple[str, ...]:
    """One line of a table."""
    name = parse(row.system).label
    if row.status == "bounded":
        return name, "", f"< {row.samples_per_s:.1f}", "", "", "not run: too slow in an easier cell"
    if row.status != "ok":
        return name, "", "", "", "", row.status
    faster = ratio(comparison, row)
    times = "" if row.system == OSDP or faster is None else f"{faster:.2f}x"
    return (
        name,
        str(row.batch_size),
        f"{row.samples_per_s:.1f}",
        times,
        f"{row.peak_bytes / MIB:.0f} MiB",
        remark(row),
    )


def remark(row: Row) -> str:
    """How the figure came about; OSDP's plan and what it cost to make."""
    spread = f"median of {len(row.repeats)}: {min(row.repeats):.1f}-{max(row.repeats):.1f}" if row.repeats else "search"
    if not row.detail:
        return spread
    modes = row.detail["plan"]["parameters"]
    shares = ", ".join(f"{mode} {count / sum(modes.values()):.0%}" for mode, count in sorted(modes.items()))
    warm = f", again {row.detail['warm_setup_s']:.1f} s" if "warm_setup_s" in row.detail else ""
    return f"{spread}; {shares}; set-up {row.detail['cold_setup_s']:.1f} s{warm}"


def totals(comparisons: Sequence[Comparison]) -> list[Versus]:
    """OSDP against the best of all others, and against the paper's baseline in each family."""
    found = [Versus("best of all others", _ratios((c, c.best()) for c in comparisons))]
    found.append(Versus("OSDP without tensor parallelism", _ratios((c, c.row(NO_TP)) for c in comparisons)))
    families = dict.fromkeys(MODELS[c.cell.model].family for c in comparisons)
    for family in families:
        own = [c for c in comparisons if MODELS[c.cell.model].family == family]
        found.append(Versus(f"{family}: best of all others", _ratios((c, c.best()) for c in own)))
        found.append(Versus(f"{family}: FairScale FSDP per operator", _ratios((c, _paper(c, False)) for c in own)))
        found.append(Versus(f"{family}: the same, recomputed", _ratios((c, _paper(c, True)) for c in own)))
    papers = [c for c in comparisons if MODELS[c.cell.model].family in PAPERS_FAMILIES]
    found.append(
        Versus(f"{', '.join(PAPERS_FAMILIES)}: the same, recomputed", _ratios((c, _paper(c, True)) for c in papers))
    )
    return [versus for versus in found if versus.ratios]


def _paper(comparison: Comparison, recomputed: bool) -> Row | None:
    rows = [row for row in comparison.rows if row.system.startswith(PAPER) and row.status == "ok"]
    wanted = [row for row in rows if parse(row.system).checkpointing == recomputed]
    return max(wanted, key=lambda row: row.samples_per_s, default=None)


def _ratios(pairs: Iterable[tuple[Comparison, Row | None]]) -> tuple[float, ...]:
    return tuple(found for pair in pairs if (found := ratio(*pair)) is not None)


def alone_alive(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Cells in which OSDP trains and nothing else does. What was not run, being too slow anyway, may train."""
    return [c for c in comparisons if c.osdp.status == "ok" and not any(_lives(row) for row in c.rows)]


def _lives(row: Row) -> bool:
    return row.system not in OWN and row.status in ("ok", "bounded")


def lost(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Cells in which something else trains and OSDP does not."""
    return [c for c in comparisons if c.osdp.status != "ok" and c.best() is not None]


def behind(comparisons: Sequence[Comparison], least: float = 0.97) -> list[Comparison]:
    """Cells in which the best of the others is faster."""
    return [c for c in comparisons if (found := ratio(c, c.best())) is not None and found < least]


def totals_table(comparisons: Sequence[Comparison]) -> Table:
    """What the cells add up to."""
    table = Table(title="OSDP's samples/s over those of", title_justify="left", title_style="bold")
    for name in HEADINGS:
        table.add_column(name, justify="right" if name else "left")
    for versus in totals(comparisons):
        table.add_row(versus.what, *versus.words())
    return table


def verdicts(comparisons: Sequence[Comparison]) -> list[str]:
    """What the tables leave to be said."""
    setups = [c.osdp.detail for c in comparisons if c.osdp.detail]
    cold = max((setup["cold_setup_s"] for setup in setups), default=0.0)
    warm = max((setup.get("warm_setup_s", 0.0) for setup in setups), default=0.0)
    named = (
        ("OSDP alone trains", alone_alive(comparisons)),
        ("OSDP does not train, something else does", lost(comparisons)),
        ("OSDP is more than 3 % behind", behind(comparisons)),
    )
    lines = [f"{what} in {len(found)} of {len(comparisons)} cells" + _list(found) for what, found in named]
    second = f", the second start {warm:.1f} s" if warm else ""
    return [*lines, f"OSDP's set-up takes {cold:.1f} s at most{second}"]


def _list(found: Sequence[Comparison]) -> str:
    return ": " + "; ".join(c.cell.label for c in found) if found else ""


def as_json(comparisons: Sequence[Comparison], facts: dict[str, Any]) -> dict[str, Any]:
    """Everything."""
    return {
        "facts": facts,
        "cells": [{**asdict(c.cell), "made": c.made, "rows": [asdict(row) for row in c.rows]} for c in comparisons],
        "totals": [asdict(versus) for versus in totals(comparisons)],
        "verdicts": verdicts(comparisons),
    }


def from_json(everything: dict[str, Any]) -> list[Comparison]:
    """The comparisons of ``as_json``."""
    return [
        Comparison(
            Cell(**{field.name: cell[field.name] for field in fields(Cell)}),
            tuple(Row(**{**row, "repeats": tuple(row["repeats"])}) for row in cell["rows"]),
            cell["made"],
        )
        for cell in everything["cells"]
    ]
