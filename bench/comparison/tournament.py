"""Decides what to run in each cell: every system at its best, then the best ones in turns with OSDP."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.comparison.batch_probe import (
    SLOW_STEP_S,
    SLOW_WARM_UP,
    WARM_UP,
    estimate_largest,
    fewer,
    gains_nothing,
    longest_step,
    next_sizes,
    time_for,
)
from bench.comparison.cells import Cell, is_easier
from bench.comparison.jobs import Job
from bench.comparison.records import Runs
from bench.comparison.systems import OSDP, OWN, System

SLACK = 1.15
"""A system is left out of a cell if even this much more than it reached in an easier one would not win."""
OSDP_TIMEOUTS = 2
"""How many time-outs OSDP has: it measures first, and may choose batches whose steps are slow."""
PAPER = "fairscale-op"
"""Always among the finalists, if it lives: what the paper compares with."""


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    search_steps: int = 4
    final_steps: int = 8
    repeats: int = 3
    finalists: int = 3
    timeout_s: float = 240.0
    budget_s: float = 60.0

    def changed(self, **changes: int) -> Effort:
        """The same but for ``changes``."""
        return replace(self, **changes)


QUICK = Effort(search_steps=1, final_steps=4, repeats=1, finalists=1, timeout_s=150.0, budget_s=15.0)


@dataclass(frozen=True)
class Row:
    """What a system reaches in a cell."""

    system: str
    status: str
    """``ok``; ``bounded``: not run, since it was too slow in an easier cell; or why it does not train."""
    batch_size: int = 0
    samples_per_s: float = 0.0
    """Over all ranks; median of the repeats if it was among the finalists."""
    repeats: tuple[float, ...] = ()
    """Of the finalists, in turns, and of one run at a size known from a faster link; empty if the figure is of a
    search."""
    peak_bytes: int = 0
    detail: dict[str, Any] = field(default_factory=dict)
    """OSDP: seconds of its set-up with and without measurements from before, and its plan."""


@dataclass(frozen=True)
class Comparison:
    """All rows of a cell, best first."""

    cell: Cell
    rows: tuple[Row, ...]
    made: dict[str, Any] = field(default_factory=dict)
    """``command``, ``date``, ``commits`` and ``machine`` that it is of, once it is written down."""

    def row(self, system: str) -> Row | None:
        """That of a system."""
        return next((row for row in self.rows if row.system == system), None)

    @property
    def osdp(self) -> Row:
        """OSDP's."""
        row = self.row(OSDP)
        assert row is not None
        return row

    def best(self, *prefixes: str) -> Row | None:
        """The fastest competitor that trains, among those whose name begins with one of ``prefixes`` (all if none)."""
        others = [row for row in self.rows if row.system not in OWN and row.status == "ok"]
        wanted = [row for row in others if not prefixes or row.system.startswith(prefixes)]
        return max(wanted, key=lambda row: row.samples_per_s, default=None)


class Comparer:
    """Compares systems cell by cell, and remembers what it saw in easier cells.

    Args:
        runs: runs jobs.
        systems: the competitors.
        effort: how much to measure.
        device: ``cpu`` or ``cuda``.
    """

    def __init__(self, runs: Runs, systems: Sequence[System], effort: Effort, device: str) -> None:
        self._runs, self._systems, self._effort, self._device = runs, systems, effort, device
        self._seen: list[tuple[Cell, Row]] = []
        self._peaks: dict[tuple[str, int, str], dict[int, int]] = {}
        self._measured: dict[tuple[Cell, str], dict[str, Any]] = {}
        """First runs of finals that stood in for a search."""

    def compare(self, cell: Cell) -> Comparison:
        """Searches each competitor's best batch size, then measures the finalists and OSDP in turns."""
        names = [OSDP, *(system.name for system in self._systems if system.name in OWN)]
        first = {name: self._own(cell, name, repeat=0) for name in dict.fromkeys(names)}
        rows = {
            name: Row(name, result["outcome"], *_figures(result, cell), detail=_plan_detail(result))
            for name, result in first.items()
        }
        for system in (system for system in self._systems if system.name not in rows):
            best = max(row.samples_per_s for row in rows.values())
            rows[system.name] = self._at_its_best(cell, system.name, best)
        self._seen += [(cell, row) for row in rows.values()]
        for row in self._finals(cell, rows, first):
            rows[row.system] = row
        return Comparison(cell, tuple(sorted(rows.values(), key=lambda row: -row.samples_per_s)))

    # Search

    def _at_its_best(self, cell: Cell, system: str, best: float) -> Row:
        easier = [(seen, row) for seen, row in self._seen if row.system == system and is_easier(seen, cell)]
        dead = [row for _, row in easier if row.status not in ("ok", "bounded")]
        if dead:
            return Row(system, dead[0].status)
        bound = min((row.samples_per_s for _, row in easier), default=float("inf"))
        if bound * SLACK < best:
            return Row(system, "bounded", samples_per_s=bound)
        faster_links = [row for seen, row in easier if row.status == "ok" and seen.memory_bytes == cell.memory_bytes]
        return self._at_the_same_size(cell, faster_links[-1]) if faster_links else self._search(cell, system)

    def _at_the_same_size(self, cell: Cell, row: Row) -> Row:
        """At what was best over a faster link, as in the finals. A slower link adds the same to a step of any size: a
        smaller size, which lost there, loses by more here."""
        result = self._final(cell, row, repeat=0)
        self._measured[cell, row.system] = result
        return _median_row(row, cell, [result])

    def _search(self, cell: Cell, system: str) -> Row:
        """Tries batch sizes. What a process had no time for is tried in another one."""
        peaks = self._peaks.setdefault((cell.model, cell.where.ranks, system), {})
        estimate, dead, status = estimate_largest(peaks, cell.memory_bytes), None, "out of memory"
        lived: dict[int, dict[str, Any]] = {}
        steps_s: dict[int, float] = {}
        sizes = next_sizes(0, None, estimate)
        while sizes:
            step_s = longest_step(steps_s, sizes[0])
            result = self._runs.get(self._job("search", cell, system, sizes, until_flat=dead is None, step_s=step_s))
            lived |= {size["batch_size"]: size for size in result["sizes"]}
            steps_s = {size: one["step_s"] for size, one in lived.items()}
            peaks.update({size["batch_size"]: size["peak_bytes"] for size in result["sizes"]})
            if result["outcome"] == "out of memory":
                dead = min(size for size in sizes if size not in lived)
            elif result["outcome"] != "ok":
                status = result["outcome"]
            why = result.get("stop", {}).get("why")
            if result["outcome"] not in ("ok", "out of memory") or why == "flat":
                break
            if dead is not None and gains_nothing(steps_s, dead):
                break
            left = tuple(size for size in sizes if size not in lived)
            sizes = left if why == "late" and dead not in left else next_sizes(max(lived, default=0), dead)
        if not lived:
            return Row(system, status)
        best = max(lived.values(), key=lambda size: size["batch_size"] / size["step_s"])
        return Row(system, "ok", best["batch_size"], _rate(best, cell), peak_bytes=best["peak_bytes"])

    # Finals

    def _finals(self, cell: Cell, rows: dict[str, Row], first: dict[str, dict[str, Any]]) -> list[Row]:
        finalists = self._finalists(rows)
        results: dict[str, list[dict[str, Any]]] = {system: [] for system in finalists}
        own = {name: [result] for name, result in first.items() if result["outcome"] == "ok"}
        for repeat in range(self._effort.repeats):
            for name in own if repeat else ():
                own[name].append(self._own(cell, name, repeat))
            for system in finalists:
                measured = self._measured.get((cell, system)) if not repeat else None
                results[system].append(measured or self._final(cell, rows[system], repeat))
        return [_median_row(rows[system], cell, measured) for system, measured in (results | own).items()]

    def _finalists(self, rows: dict[str, Row]) -> list[str]:
        alive = [row for row in rows.values() if row.system not in OWN and row.status == "ok"]
        ranked = [row.system for row in sorted(alive, key=lambda row: -row.samples_per_s)]
        chosen = ranked[: self._effort.finalists]
        for prefix, others in ((PAPER + "+ckpt", ()), (PAPER, (PAPER + "+ckpt",))):
            paper = [name for name in ranked if name.startswith(prefix) and not (others and name.startswith(others))]
            chosen += paper[:1]
        return list(dict.fromkeys(chosen))

    def _final(self, cell: Cell, row: Row, repeat: int) -> dict[str, Any]:
        """A process of its own at the best size; if it is killed there after all, at a little less."""
        size, step_s = row.batch_size, row.batch_size * cell.where.ranks / row.samples_per_s
        while True:
            result = self._runs.get(self._job("final", cell, row.system, (size,), repeat, step_s=step_s))
            if result["outcome"] != "out of memory" or size == 1:
                return result
            size -= max(1, size // 8)

    def _own(self, cell: Cell, name: str, repeat: int) -> dict[str, Any]:
        return self._runs.get(self._job("final", cell, name, (), repeat))

    def _job(
        self,
        purpose: str,
        cell: Cell,
        system: str,
        sizes: tuple[int, ...],
        repeat: int = 0,
        until_flat: bool = False,
        step_s: float = 0.0,
    ) -> Job:
        """What to run; ``step_s`` is about how long a step takes, if known."""
        effort = self._effort
        final = purpose == "final"
        steps = fewer(effort.final_steps if final else effort.search_steps, step_s)
        warm_up = WARM_UP if final and step_s <= SLOW_STEP_S else SLOW_WARM_UP
        timeout_s = effort.timeout_s * (OSDP_TIMEOUTS if system in OWN else 1)
        return Job(
            purpose,
            cell.model,
            cell.setting,
            system,
            sizes,
            memory_bytes=cell.memory_bytes,
            repeat=repeat,
            warm_up=warm_up,
            steps=steps,
            until_flat=until_flat,
            budget_s=effort.budget_s,
            timeout_s=max(timeout_s, time_for(warm_up + steps, step_s)),
            device=self._device,
        )


def _rate(size: dict[str, Any], cell: Cell) -> float:
    return float(size["batch_size"] * cell.where.ranks / size["step_s"])


def _figures(result: dict[str, Any], cell: Cell) -> tuple[int, float, tuple[float, ...], int]:
    if result["outcome"] != "ok":
        return 0, 0.0, (), result["peak_bytes"]
    size = result["sizes"][-1]
    return size["batch_size"], _rate(size, cell), (), result["peak_bytes"]


def _plan_detail(result: dict[str, Any]) -> dict[str, Any]:
    plan = result.get("plan", {})
    return {"cold_setup_s": result.get("ready", {}).get("setup_s"), "plan": plan} if plan else {}


def _median_row(row: Row, cell: Cell, results: list[dict[str, Any]]) -> Row:
    """The row with the medians of what its runs reached; a system that a run killed has that for a status."""
    died = [result for result in results if result["outcome"] != "ok"]
    if died:
        return Row(row.system, died[0]["outcome"], detail=row.detail)
    rates = tuple(_rate(result["sizes"][-1], cell) for result in results)
    detail = dict(row.detail)
    if len(results) > 1 and detail:
        detail["warm_setup_s"] = statistics.median(result["ready"]["setup_s"] for result in results[1:])
    return Row(
        row.system,
        "ok",
        min(result["sizes"][-1]["batch_size"] for result in results),
        statistics.median(rates),
        rates,
        max(result["peak_bytes"] for result in results),
        detail,
    )
