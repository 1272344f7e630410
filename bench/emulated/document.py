"""The tables of the emulated comparison, from the results that are there."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.comparison.models import MODELS, PAPERS_FAMILIES
from bench.comparison.systems import BASES, parse
from bench.emulated.queue import Cell, Results

MIB = 1 << 20
PLAIN, FAIRSCALE = "osdp-plain", "fairscale-op"
FULL = "32-true"
"""The precision that is compared with the paper's figures."""
PAPERS_FIGURES = dict(zip(PAPERS_FAMILIES, (1.22, 1.50, 1.24), strict=True))
PAPERS_RECOMPUTED = 1.53

TIME_TOLERANCE, MEMORY_TOLERANCE = 0.10, 0.03

Place = tuple[str, int, str, int]
"""Model, ranks, links, limit."""


def errors(result: dict[str, Any]) -> tuple[float, float]:
    """Relative, of a plan's time and memory; above 0: predicted too much."""
    return (result["predicted_s"] / result["step_s"] - 1, result["predicted_bytes"] / result["peak_bytes"] - 1)


def apart(result: dict[str, Any], name: str) -> float:
    """By how much emulated is more than real."""
    return float(result["emulated"][name] / result["real"][name] - 1)


def line(cell: Cell, result: dict[str, Any]) -> str:
    """A result in one line, for the terminal."""
    where = f"{cell.model:12} {cell.ranks:4} ranks {cell.links:16} {cell.limit_mib or 'all':>6} MiB {cell.system:18}"
    if "error" in result:
        return f"{where} {result['error']}"
    text = (
        f"{where} batch {result['batch_size']:3} {result['step_s']:7.3f} s {result['samples_per_s']:9.1f}/s "
        f"{result['peak_bytes'] / MIB:7.0f} MiB"
    )
    if "predicted_s" in result:
        text += f"  predicted {result['predicted_s']:.3f} s {result['predicted_bytes'] / MIB:.0f} MiB"
    return text


def label(system: str) -> str:
    """Of a system, for people."""
    if system.startswith("osdp"):
        return {"osdp": "OSDP", PLAIN: "OSDP, nothing recomputed"}[system]
    one = parse(system)
    return BASES[one.base] + ", recomputed" * one.checkpointing


def place_of(cell: Cell) -> Place:
    """Where its result is compared with others."""
    return (cell.model, cell.ranks, cell.links, cell.limit_mib)


def by_place(cells: Sequence[Cell], results: Results) -> dict[Place, dict[str, dict[str, Any]]]:
    """Place -> system -> result, as far as there are any."""
    found: dict[Place, dict[str, dict[str, Any]]] = {}
    for cell in cells:
        result = results.get(cell)
        if result is not None:
            found.setdefault(place_of(cell), {})[cell.system] = result
    return found


def rate(rows: dict[str, dict[str, Any]], system: str) -> float:
    """Samples per second; 0 where it does not train or was not run."""
    return float(rows.get(system, {}).get("samples_per_s", 0.0))


def best_peer(rows: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """The fastest of the others, and its samples per second."""
    others = [(rate(rows, system), system) for system in rows if not system.startswith("osdp")]
    speed, system = max(others, default=(0.0, ""))
    return system, speed


def complete(cells: Sequence[Cell], results: Results) -> dict[Place, dict[str, dict[str, Any]]]:
    """Of ``by_place``, where all that is to be compared was run."""
    wanted = systems_by_place(cells)
    return {place: rows for place, rows in by_place(cells, results).items() if wanted[place] <= set(rows)}


def systems_by_place(cells: Sequence[Cell]) -> dict[Place, set[str]]:
    """What is to be compared at each place."""
    wanted: dict[Place, set[str]] = {}
    for cell in cells:
        wanted.setdefault(place_of(cell), set()).add(cell.system)
    return wanted


def summary(cells: Sequence[Cell], results: Results) -> list[str]:
    """What it adds up to, over the places where all systems were run."""
    places = complete(cells, results)
    leads = [
        rate(rows, "osdp") / best_peer(rows)[1] for rows in places.values() if best_peer(rows)[1] and rate(rows, "osdp")
    ]
    if not leads:
        return ["No model was run under all systems yet."]
    lines = [
        f"- OSDP beside the best of the others, {len(leads)} places: geometric mean "
        f"{statistics.geometric_mean(leads):.2f}, least {min(leads):.2f}, most {max(leads):.2f}."
    ]
    lines += _beside_paper(places) if any(cell.system == FAIRSCALE for cell in cells) else []
    known = [errors(row) for rows in places.values() for row in rows.values() if "predicted_s" in row]
    times, memories = zip(*known, strict=True)
    middle = statistics.median(map(abs, times))
    lines.append(
        f"- Predicted beside emulated, {len(known)} plans: time {middle:.1%} apart in the median, "
        f"memory {min(memories):+.1%} to {max(memories):+.1%}."
    )
    return lines


def _beside_paper(places: dict[Place, dict[str, dict[str, Any]]]) -> list[str]:
    """Leads over the paper's baseline, beside the paper's."""
    lines = []
    for family in PAPERS_FAMILIES:
        own = [rows for (model, *_), rows in places.items() if family_of(model) == family]
        lines += [_against_fairscale(family, own, PLAIN, FAIRSCALE, PAPERS_FIGURES[family])]
    papers = [rows for (model, *_), rows in places.items() if family_of(model) in PAPERS_FAMILIES]
    lines += [_against_fairscale("All three, recomputed", papers, "osdp", FAIRSCALE + "+ckpt", PAPERS_RECOMPUTED)]
    return lines


def family_of(model: str) -> str:
    """The family of a model's name."""
    return MODELS[model].family if model in MODELS else model.split()[0]


def _against_fairscale(
    name: str, places: Sequence[dict[str, dict[str, Any]]], own: str, other: str, papers: float
) -> str:
    ratios = [rate(rows, own) / rate(rows, other) for rows in places if rate(rows, other)]
    only = sum(1 for rows in places if rate(rows, own) and not rate(rows, other))
    text = ", ".join(f"{one:.2f}" for one in ratios) or "none"
    more = f"; {only} more that only OSDP trains" if only else ""
    return f"- {name} against FairScale per operator{more}: {text} (paper: {papers:.2f})."


def page(cells: Sequence[Cell], results: Results) -> str:
    """docs/benchmarks/emulated.md."""
    places, systems = by_place(cells, results), list(dict.fromkeys(cell.system for cell in cells))
    wanted = systems_by_place(cells)
    missing = sum(results.get(cell) is None for cell in cells)
    template = "template.md" if cells[0].precision == FULL else "mixed_template.md"
    lines = [(Path(__file__).parent / template).read_text().rstrip(), "", "## What it adds up to", ""]
    lines += [*summary(cells, results), ""]
    lines += [f"{missing} of {len(cells)} cells were not run." if missing else "All cells were run.", ""]
    smallest = {cell.model: min(one.limit_mib for one in cells if one.model == cell.model) for cell in cells}
    for ranks, has_more in sorted({(cell.ranks, cell.limit_mib > smallest[cell.model]) for cell in cells}):
        here = {
            place: rows
            for place, rows in places.items()
            if place[1] == ranks and (place[3] > smallest[place[0]]) == has_more
        }
        if not here:
            continue
        models = [place[0] for place in here]
        lines += [
            f"## {ranks} ranks, {'more' if has_more else 'little'} memory",
            "",
            "Samples per second of all ranks, the batch size of a rank in brackets.",
            "",
        ]
        lines.append(f"| | {' | '.join(models)} |")
        lines.append("| --- |" + " ---: |" * len(models))
        lines.append(f"| limit of the model's memory | {' | '.join(f'{place[3]} MiB' for place in here)} |")
        for system in systems:
            entries = (_entry(rows.get(system)) if system in wanted[place] else "" for place, rows in here.items())
            lines.append(f"| {label(system)} | {' | '.join(entries)} |")
        lines.append(f"| **OSDP / best other** | {' | '.join(map(_lead, here.values()))} |")
        lines += ["", "OSDP's plans, predicted beside emulated:", ""]
        lines += ["| model | parameters by mode | recomputed | step | memory |", "| --- | --- | ---: | ---: | ---: |"]
        lines += [_plan(model, rows) for (model, *_), rows in here.items() if "predicted_s" in rows.get("osdp", {})]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def accuracy(file: Path) -> str:
    """The section on predicted beside emulated figures, from the results of ``emulated-accuracy``."""
    cells = [cell for cell in _cells_of(file) if "predicted_s" in cell and cell["work"] == "accuracy"]
    head = (Path(__file__).parent / "accuracy_template.md").read_text().rstrip() + " "
    if not cells:
        return head + "not run yet (`python -m bench emulated-accuracy`).\n"
    lines = [head + "`emulated-accuracy.json`.", ""]
    lines += ["| ranks | models | time, median | within 10 % | memory within 3 % | least | most |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for ranks in sorted({cell["ranks"] for cell in cells}):
        times, memories = zip(*(errors(cell) for cell in cells if cell["ranks"] == ranks), strict=True)
        lines.append(
            f"| {ranks} | {len(times)} | {statistics.median(map(abs, times)):.1%} | "
            f"{sum(abs(one) <= TIME_TOLERANCE for one in times)} | "
            f"{sum(abs(one) <= MEMORY_TOLERANCE for one in memories)} | {min(memories):+.1%} | {max(memories):+.1%} |"
        )
    return "\n".join(lines) + "\n"


def real(file: Path) -> str:
    """The section on emulated beside real figures, from the results of ``emulated-real``."""
    cells = [cell for cell in _cells_of(file) if "real" in cell]
    head = "\n## Emulated beside real\n\nThe same plans on gloo ranks of this machine and emulated with their links: "
    if not cells:
        return head + "not run yet (`python -m bench emulated-real`).\n"
    lines = [
        head + "`emulated-real.json`.",
        "",
        "| ranks | model | plan | time | memory |",
        "| ---: | --- | --- | ---: | ---: |",
    ]
    for cell in cells:
        time, memory = (apart(cell, name) for name in ("step_s", "peak_bytes"))
        lines.append(f"| {cell['ranks']} | {cell['model']} | {cell['system']} | {time:+.1%} | {memory:+.1%} |")
    return "\n".join(lines) + "\n"


def _cells_of(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["cells"].values()) if file.exists() else []


def _entry(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    return result["error"] if "error" in result else f"{result['samples_per_s']:.1f} ({result['batch_size']})"


def _lead(rows: dict[str, dict[str, Any]]) -> str:
    _, speed = best_peer(rows)
    return f"**{rate(rows, 'osdp') / speed:.2f}**" if speed and rate(rows, "osdp") else ""


def _plan(model: str, rows: dict[str, dict[str, Any]]) -> str:
    row = rows["osdp"]
    whole = sum(row["modes"].values())
    modes = ", ".join(f"{mode} {number / whole:.0%}" for mode, number in row["modes"].items())
    step = f"{row['predicted_s']:.2f} s / {row['step_s']:.2f} s"
    memory = f"{row['predicted_bytes'] / MIB:.0f} / {row['peak_bytes'] / MIB:.0f} MiB"
    return f"| {model} | {modes} | {row['recomputed']} | {step} | {memory} |"
