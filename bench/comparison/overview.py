"""The pictures of README and summary: OSDP beside DDP and FSDP under the same limits, and its lead in every cell.

python -m bench.comparison.overview     # draws them anew from docs/benchmarks/results.json
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from bench.comparison import report
from bench.comparison.cells import MIB
from bench.comparison.models import I_AND_C, MODELS, N_AND_D, W_AND_S
from bench.comparison.records import ROOT
from bench.comparison.svg import INK, LINE, MUTED, Picture
from bench.comparison.systems import NO_TP, OSDP
from bench.comparison.tournament import Comparison, Row

SHOWN = {
    "nd-small": "narrow and deep, 19 M parameters",
    "ws-small": "wide and shallow, 22 M parameters",
    "ic-small": "mixed widths, 28 M parameters",
}
"""One model of each of the paper's families: those for which DDP was run under every limit."""
SETTING = "2-2gbit"
"""The middle one of the three links."""
LEVELS = ("tight", "middle", "plenty")
KINDS = {"DDP": ("ddp",), "FSDP": ("fsdp-", "shard", "fairscale-"), "OSDP": (OSDP,)}
"""What a bar stands for: the best of these systems, with or without recomputing and the allocator setting."""
COLOURS = {"DDP": "#a5b4c4", "FSDP": "#5b8bb5", "OSDP": "#d9620f"}
ALT = {
    "overview.svg": "Samples per second of DDP, FSDP and OSDP under the same memory limits: OSDP trains about as fast "
    "as the faster of the two, or faster, and DDP fits under the largest limit only.",
    "leads.svg": "OSDP's samples per second over those of the best other system, one dot for each cell.",
}


def draw_all(comparisons: Sequence[Comparison], folder: Path) -> list[Path]:
    """Those pictures that the cells suffice for."""
    by_name = {(c.cell.model, c.cell.setting, c.cell.level): c for c in comparisons}
    chosen = {(model, level): by_name.get((model, SETTING, level)) for model in SHOWN for level in LEVELS}
    found = [draw(chosen, folder / "overview.svg")] if all(chosen.values()) else []
    return [*found, draw_leads(comparisons, folder / "leads.svg")] if len(comparisons) > 20 else found


def best(comparison: Comparison, kind: str) -> Row | None:
    """The fastest that was run or, if a system that was not run might be faster, that one's upper bound; None if
    nothing of the kind trains."""
    rows = [row for row in comparison.rows if row.system.startswith(KINDS[kind]) and row.status in ("ok", "bounded")]
    rows = [row for row in rows if row.system != NO_TP]
    return max(rows, key=lambda row: (row.samples_per_s, row.status == "ok"), default=None)


def draw(cells: dict[tuple[str, str], Comparison | None], file: Path) -> Path:
    """Three panels, one for each model: three limits, three bars each."""
    picture = Picture(960, 330, "Samples per second under the same memory limit", ALT["overview.svg"])
    picture.text(24, 30, "Samples per second under the same memory limit (higher is better)", 16, bold=True)
    x = 24.0
    for name, words in (
        ("DDP", "DDP"),
        ("FSDP", "FSDP: the best of Lightning's and FairScale's, recomputing or not"),
        ("OSDP", "OSDP (this library)"),
    ):
        picture.box(x, 44, 14, 14, COLOURS[name])
        picture.text(x + 20, 56, words, 13)
        x += 36 + 7.1 * len(words)
    picture.box(x, 44, 14, 14, COLOURS["FSDP"])
    picture.box(x, 44, 14, 14, "url(#stripes)")
    picture.text(x + 20, 56, "not run; at most this", 13)
    top = max(row.samples_per_s for c in cells.values() if c for kind in KINDS if (row := best(c, kind)))
    for index, (model, words) in enumerate(SHOWN.items()):
        panel(picture, 24 + index * 312, words, [c for level in LEVELS if (c := cells[model, level])], 170 / top)
    return picture.write(file)


def panel(picture: Picture, left: float, title: str, comparisons: Sequence[Comparison], scale: float) -> None:
    """One model."""
    floor, width = 280.0, 28.0
    picture.text(left + 144, 84, title, 13, MUTED, "middle")
    picture.line(left, floor, left + 288, floor)
    for group, comparison in enumerate(comparisons):
        start = left + 6 + group * 96
        limit = f"{comparison.cell.memory_bytes / MIB:.0f} MiB"
        picture.text(start + 1.5 * width, floor + 18, limit, 13, INK, "middle")
        for index, kind in enumerate(KINDS):
            row, x = best(comparison, kind), start + index * width
            if row is None:
                picture.text(x + width / 2 + 4, floor - 6, "does not fit", 12, "#b42318", turned=True)
                continue
            height = row.samples_per_s * scale
            picture.box(x + 1, floor - height, width - 2, height, COLOURS[kind], radius=2)
            if row.status == "bounded":
                picture.box(x + 1, floor - height, width - 2, height, "url(#stripes)", radius=2)
            words = f"{row.samples_per_s:.1f}"
            picture.text(x + width / 2, floor - height - 5, words, 11.5, INK, "middle", bold=kind == "OSDP")
    picture.text(left + 144, floor + 38, "memory limit of each of 2 processes", 12, MUTED, "middle")


def draw_leads(comparisons: Sequence[Comparison], file: Path) -> Path:
    """A row of dots for each family, on a logarithmic scale."""
    families = {N_AND_D: "narrow and deep", W_AND_S: "wide and shallow", I_AND_C: "mixed widths"}
    names = list(dict.fromkeys(MODELS[c.cell.model].family for c in comparisons))
    picture = Picture(960, 96 + 44 * len(names), "OSDP's lead in every cell", ALT["leads.svg"])
    picture.text(24, 30, "OSDP over the best other system, one dot for each cell", 16, bold=True)
    left, right, bottom = 190.0, 930.0, 56.0 + 44 * len(names)

    def place(ratio: float) -> float:
        return left + (right - left) * (math.log(ratio) - math.log(0.9)) / (math.log(3.1) - math.log(0.9))

    for mark in (0.9, 1.0, 1.2, 1.5, 2.0, 3.0):
        picture.line(place(mark), 46, place(mark), bottom, INK if mark == 1 else "#e4e7eb", dashed=mark == 1)
        picture.text(place(mark), bottom + 20, "as fast" if mark == 1 else f"{mark:g}x", 12, MUTED, "middle")
    for index, family in enumerate(names):
        y = 68.0 + 44 * index
        picture.text(24, y + 4, families.get(family, family), 13)
        picture.line(left, y, right, y, "#e4e7eb")
        own = [c for c in comparisons if MODELS[c.cell.model].family == family]
        for number, ratio in enumerate(sorted(r for c in own if (r := report.ratio(c, c.best())) is not None)):
            shift = (-6, 0, 6)[number % 3]
            picture.circle(place(ratio), y + shift, 4, "#d9620fb0" if ratio >= 1 else LINE)
    return picture.write(file)


def main() -> None:
    folder = ROOT / "docs" / "benchmarks"
    comparisons = report.from_json(json.loads((folder / "results.json").read_text(encoding="utf-8")))
    for file in draw_all(comparisons, folder):
        print(f"written: {file}")


if __name__ == "__main__":
    main()
