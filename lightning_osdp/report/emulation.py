"""The table of ``osdp emulate``: what was predicted for OSDP's plan, and what each strategy took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from lightning_osdp.planning.spec.formatting import format_bytes, format_seconds
from lightning_osdp.planning.spec.plan import ExecutionPlan

NAMES = {"osdp": "OSDP", "ddp": "DDP", "fsdp": "FSDP", "fsdp2": "fully_shard"}


def emulation_table(rows: Sequence[Mapping[str, Any]], plan: ExecutionPlan | None) -> Table:
    """Return a table with one row for each strategy, and one for the prediction of ``plan`` if there is one.

    Args:
        rows: for each strategy its name, and either an error or the measured figures.
        plan: OSDP's plan.
    """
    table = Table(box=None, pad_edge=False)
    for title in ("strategy", "batch size", "step time", "samples/s", "peak memory"):
        table.add_column(title, justify="left" if title == "strategy" else "right")
    if plan is not None:
        table.add_row(
            "OSDP, predicted",
            str(plan.batch_size),
            format_seconds(plan.predicted.step_time_s),
            f"{plan.predicted.samples_per_s:,.1f}",
            format_bytes(plan.predicted.peak_memory_bytes),
        )
    for row in rows:
        name = NAMES[row["strategy"]]
        if "error" in row:
            table.add_row(name, "", row["error"])
            continue
        table.add_row(
            name,
            str(row["batch_size"]),
            format_seconds(row["step_time_s"]),
            f"{row['samples_per_s']:,.1f}",
            format_bytes(row["peak_memory_bytes"]),
        )
    return table
