"""docs/benchmarks.md and docs/benchmarks/runs.md: the comparisons with machine, date and command."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from bench.comparison import figures, overview, report
from bench.comparison.cells import SHARES
from bench.comparison.models import MODELS, build
from bench.comparison.records import ROOT
from bench.comparison.systems import OSDP
from bench.comparison.tournament import Comparison

METHOD = """
Every system trains the same LightningModule with the same weights on the same text (the source of Python's standard
library, byte by byte) with fused AdamW in float32, one thread a rank. A figure is the median over the steps after
warm-up of a process of its own, times the ranks; a step's time runs from the end of one to the end of the next, loop
and data included. All but FairScale's run in Lightning's Trainer and differ by the strategy alone; FairScale's run in
a bare loop, which has less overhead and so favours them.

{limited}
For each system the batch size is doubled until a rank is killed or throughput stops growing, then narrowed to an
eighth, or until no size that may fit promises 2 % more by the steps of those that do.
What was best over a faster link is best here too, if it still fits: what is sent adds the same to a step of any size.
The best systems then run again in turns with OSDP; medians are shown. A system that could not
win even with 15 % more than it reached in an easier cell (a faster link or more memory) is not run, and its figure
there is shown as an upper bound.

Limits are set without asking OSDP: the least is the peak of FairScale's FSDP per operator at batch size 1, the most
that of DDP (at batch size 8 where replicating is to be possible, else at 1), both with the allocator setting. A limit
lies at {small} of the way for models that can be replicated, at {large} for the others; below
the least, that is, for the first of them, to see who trains there at all.

"Recomputed" is activation checkpointing of every block. OSDP is `OSDPStrategy()`: it finds the limit itself.
{more}
""".strip()

LIMITED = {
    "cpu": """
Each rank lives in a memory cgroup. Over its limit the kernel kills it, and the batch size counts as too large.
""".strip(),
    "cuda": """
Each rank's caching allocator takes no more than its limit (`set_per_process_memory_fraction`); over it torch raises,
and the batch size counts as too large. Where there are fewer GPUs than ranks, all of them share the first one and talk
over gloo, through the host's memory: they take turns at computing, and communication is slow compared with it.
""".strip(),
}

MORE = {
    "cpu": """
"Allocator set" means the glibc setting that OSDP makes, which keeps freed tensors from staying in the heap.

Lightning refuses its FSDPStrategy on a CPU; a subclass that passes the device on trains there, and is what is shown.
""",
    "cuda": """
"Allocator set" means segments of the caching allocator that may grow (`expandable_segments`), as OSDP has them.
""",
}


NOTES = "## What falls short, and why"
"""Heading of what people write below the figures of the summary: it stays where the page is written anew."""


def facts(arguments: Sequence[str], commits: set[str], device: str) -> dict[str, Any]:
    """Machine, versions, date and command."""
    processor = torch.cuda.get_device_name(0) if device == "cuda" else _processor()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m bench comparison " + " ".join(arguments),
        "device": device,
        "machine": f"{processor}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB",
        "versions": {name: version(name) for name in ("torch", "lightning", "fairscale", "transformers")}
        | {"python": platform.python_version()},
        "commits": sorted(commits),
    }


def write(comparisons: Sequence[Comparison], about: dict[str, Any], docs: Path = ROOT / "docs") -> Path:
    """Writes the summary, the page of all runs, their pictures and the JSON; returns the summary. Cells that are there
    already and were not compared anew stay: all of them take longer than anybody has in one go."""
    folder = docs / "benchmarks"
    file = folder / "results.json"
    made = {name: about[name] for name in ("command", "date", "commits", "machine")}
    shown = merged(_earlier(file), [replace(comparison, made=made) for comparison in comparisons])
    pictures = figures.draw(shown, folder)
    write_json(shown, about, file)
    summary = docs / "benchmarks.md"
    notes = _notes(summary)
    summary.write_text("\n".join(_summary(shown, about, overview.draw_all(shown, folder))) + "\n" + notes)
    (folder / "runs.md").write_text("\n".join(_runs(shown, about, pictures)) + "\n")
    return summary


def merged(earlier: Sequence[Comparison], new: Sequence[Comparison]) -> list[Comparison]:
    """All cells, those of ``new`` in place of the same ones of ``earlier``."""
    found = {comparison.cell.name: comparison for comparison in (*earlier, *new)}
    return sorted(found.values(), key=lambda comparison: comparison.cell.place)


def _earlier(file: Path) -> list[Comparison]:
    return report.from_json(json.loads(file.read_text())) if file.exists() else []


def _notes(page: Path) -> str:
    before = page.read_text() if page.exists() else ""
    return before[before.index(NOTES) :] if NOTES in before else ""


def write_json(comparisons: Sequence[Comparison], about: dict[str, Any], file: Path) -> None:
    """Everything, for programs."""
    file.write_text(json.dumps(report.as_json(comparisons, about), indent=1) + "\n")


def _summary(comparisons: Sequence[Comparison], about: dict[str, Any], pictures: Sequence[Path]) -> list[str]:
    """What the cells add up to, and how they were measured."""
    shares = {fits: ", ".join(f"{share:.0%}" for share in SHARES[fits]) for fits in (True, False)}
    kind = about["device"]
    words = {"limited": LIMITED[kind], "more": MORE[kind]}
    method = METHOD.format(small=shares[True], large=shares[False], **words).strip()
    return [
        "# Benchmarks: side by side",
        "",
        "OSDP and other systems train the same models under the same hard memory limits, each at its own best batch",
        f"size. A cell is one model, one number of ranks, one link and one limit; there are {len(comparisons)}.",
        "[All runs](benchmarks/runs.md) are on a page of their own, with machines and commands.",
        "",
        *(f"![{overview.ALT[picture.name]}](benchmarks/{picture.name})\n" for picture in pictures),
        "## What it adds up to",
        "",
        "OSDP's samples per second over those of other systems. N&D are narrow and deep models, W&S wide and shallow",
        "ones, I&C have layers of mixed widths; these are the families of the OSDP paper.",
        "",
        *_markdown(report.HEADINGS, [(v.what, *v.words()) for v in report.totals(comparisons)]),
        "",
        *(f"- {line}." for line in report.verdicts(comparisons)),
        "",
        "## Method",
        "",
        *method.splitlines(),
        "",
        "## Models",
        "",
        *_markdown(("model", "family", "parameters", "tokens per sample"), _models(comparisons)),
        "",
        "## Machines",
        "",
        *(f"- {machine}: {len(there)} of {len(comparisons)} cells" for machine, there in _by_machine(comparisons)),
        "",
    ]


def _runs(comparisons: Sequence[Comparison], about: dict[str, Any], pictures: Sequence[Path]) -> list[str]:
    """Every cell with all its systems, then the commands."""
    lines = [
        "---\nsearch:\n  exclude: true\n---",
        "",
        "# All runs of the comparison",
        "",
        "This page is written by `python -m bench comparison --write-docs`. [The summary](../benchmarks.md) says how",
        "the figures were measured and what they add up to. Machines and commands are at the end.",
        "",
    ]
    for model in dict.fromkeys(c.cell.model for c in comparisons):
        lines += [f"## {model}", ""]
        lines += [f"![Samples per second of {model}]({file.name})" for file in pictures if file.stem == model]
        for comparison in (c for c in comparisons if c.cell.model == model):
            lines += ["", f"### {comparison.cell.label}", "", *_cell(comparison)]
        lines.append("")
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return [*lines, "## Machines and commands", "", f"{versions}.", "", *_made(comparisons)]


def _by_machine(comparisons: Sequence[Comparison]) -> list[tuple[str, list[Comparison]]]:
    """Both sides of a ratio are of one machine."""
    machines = dict.fromkeys(c.made["machine"] for c in comparisons)
    return [(machine, [c for c in comparisons if c.made["machine"] == machine]) for machine in machines]


def _made(comparisons: Sequence[Comparison]) -> list[str]:
    """The machines, and the commands that the cells are of, each once."""
    lines = []
    for machine, there in _by_machine(comparisons):
        runs = dict.fromkeys((c.made["command"], c.made["date"]) for c in there)
        lines += [f"{machine}, {len(there)} of {len(comparisons)} cells:", ""]
        lines += [*(f"    {command}    ({date})" for command, date in runs), ""]
    return lines


def _cell(comparison: Comparison) -> list[str]:
    names = ("system", "batch size", "samples/s", "OSDP is", "peak memory", "")
    bold = [row.system == OSDP for row in comparison.rows]
    words = [report.row_words(comparison, row) for row in comparison.rows]
    return _markdown(names, [(f"**{w[0]}**", *w[1:]) if b else w for w, b in zip(words, bold, strict=True)])


def _models(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    found = []
    for name in dict.fromkeys(c.cell.model for c in comparisons):
        model, count = MODELS[name], sum(p.numel() for p in build(name).parameters())
        found.append((name, model.family, f"{count / 1e6:.1f} M", str(model.tokens)))
    return found


def _markdown(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
