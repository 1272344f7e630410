"""Emulated beside real: the same plan on real gloo ranks of this machine, and on emulated ones with the links measured.

    python -m bench emulated-real [--ranks 2 4] [--models NAME ...] [--minutes 30]

Real ranks have a core each where there are enough; what gloo itself computes is in the real steps alone. Figures are
those of rank 0. A result is kept in the JSON file: the next call goes on where one was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.emulated.document import apart
from bench.emulated.queue import Cell, Results
from bench.processes import become_rank, run_processes, write_log
from tests.support.ports import free_port

MODELS = ("gptj", "qwen2", "roberta")
PLANS = ("searched", "zdp", "zdp2", "dp")
RANKS = (2, 4)
TIMEOUT_S = 150.0
FILE = Path("docs/benchmarks/emulated-real.json")
STEPS = 12


def real_rank(rank: int, folder: str, cell: Cell, port: int) -> None:
    """One real rank: plans, trains, and writes its plan, its links and its figures."""
    become_rank(rank, cell.ranks, port, folder)
    _train(cell, folder, plan=None, ranks=cell.ranks, plugins=[], is_writer=rank == 0)


def emulated_rank(folder: str, cell: Cell) -> None:
    """The same plan, with the links that were measured."""
    from lightning_osdp.emulation import EmulatedCluster
    from lightning_osdp.planning.spec.cluster import Cluster

    write_log(f"{folder}/emulated.log")
    cluster = Cluster.model_validate_json((Path(folder) / "cluster.json").read_text())
    environment = EmulatedCluster(cluster)
    _train(cell, folder, plan=f"{folder}/plan.json", ranks=1, plugins=[environment], is_writer=True)


def _train(cell: Cell, folder: str, plan: str | None, ranks: int, plugins: list[Any], is_writer: bool) -> None:
    import lightning.pytorch as pl
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    from bench.accuracy import cases
    from bench.emulated.worker import QUIET, measured
    from lightning_osdp import OSDPCallback, OSDPStrategy
    from lightning_osdp.autotune import coordinator
    from lightning_osdp.backend.memory import memory_in_use, trim

    class BeforeModel(pl.Callback):
        """What the process takes besides the model when training begins: planning has loaded a lot in real ranks."""

        num_bytes = 0

        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            trim(torch.device("cpu"))
            self.num_bytes = memory_in_use(torch.device("cpu")) - resting_bytes(strategy.execution_plan)

    torch.set_num_threads(1)
    before, size = BeforeModel(), 4
    clusters: list[Any] = []
    original = coordinator.resolve_cluster
    cases.instead(coordinator, "resolve_cluster", lambda *args: clusters.append(original(*args)) or clusters[-1])
    order = cases.Order(cell.model, "searched", size, 0, folder, cell.ranks, 0, False)
    module, rows = cases.subject_of(order)
    strategy = OSDPStrategy(batch_size=size, cache="", plan=plan)
    modes = "auto" if cell.system == "searched" or plan is not None else cell.system
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        plugins=plugins,
        max_steps=STEPS,
        callbacks=[OSDPCallback(modes=modes, progress_bar=False), before],
        **QUIET | {"devices": ranks},
    )
    trainer.fit(module, DataLoader(rows, batch_size=size, collate_fn=cases.collate))
    if is_writer:
        made = strategy.execution_plan
        assert made is not None
        kind = "real" if plan is None else "emulated"
        if clusters:
            (Path(folder) / "cluster.json").write_text(clusters[-1].model_dump_json())
            (Path(folder) / "plan.json").write_text(made.to_json())
        (Path(folder) / f"{kind}.json").write_text(json.dumps(measured(strategy, before.num_bytes)))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def resting_bytes(plan: Any) -> int:
    """What a rank holds of the parameters between steps, before there are optimizer states."""
    ranks = plan.cluster.ranks
    parts = (
        4 * operator.num_parameters * (1 if mode == "dp" else 1 / ranks) / len(operator.slices)
        for operator in plan.operators
        for mode in operator.slices
    )
    return round(sum(parts))


def run(cell: Cell) -> dict[str, Any]:
    """Both, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        port, preloaded = free_port(), "bench.accuracy.cases"
        real = [(real_rank, (rank, folder, cell, port)) for rank in range(cell.ranks)]
        for calls in (real, [(emulated_rank, (folder, cell))]):
            if not run_processes(preloaded, calls, TIMEOUT_S):
                logs = sorted(Path(folder).glob("*.log"))
                return {"error": "failed", "log": [line for log in logs for line in log.read_text().splitlines()[-6:]]}
        return {kind: json.loads((Path(folder) / f"{kind}.json").read_text()) for kind in ("real", "emulated")}


def row(cell: Cell, result: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in result:
        return f"| {cell.model} | {cell.ranks} | {cell.system} | {result['error']} |"
    real, emulated = result["real"], result["emulated"]
    return (
        f"| {cell.model} | {cell.ranks} | {cell.system} | {real['step_s'] * 1e3:.0f} ms | "
        f"{emulated['step_s'] * 1e3:.0f} ms | {apart(result, 'step_s'):+.1%} | {real['peak_bytes'] / 2**20:.0f} MiB | "
        f"{emulated['peak_bytes'] / 2**20:.0f} MiB | {apart(result, 'peak_bytes'):+.1%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no case later")
    parser.add_argument("--json", type=Path, default=FILE)
    parser.add_argument("--fresh", action="store_true", help="run again what is kept there")
    args = parser.parse_args()
    results, start = Results(args.json, args.fresh), time.monotonic()
    print("| model | ranks | plan | real | emulated | time | real | emulated | memory |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    done = []
    for ranks in args.ranks:
        for model in args.models:
            for plan in PLANS:
                cell = Cell("real", model, ranks, plan, links="gloo")
                if results.get(cell) is None and time.monotonic() - start < args.minutes * 60:
                    results.put(cell, found := run(cell))
                    print("\n".join(found.get("log", [])), end="")
                result = results.get(cell)
                if result is not None:
                    print(row(cell, result), flush=True)
                    done += [result] if "error" not in result else []
    if done:
        times, memories = ([abs(apart(one, name)) for one in done] for name in ("step_s", "peak_bytes"))
        print(
            f"\n{len(done)} cases: time {statistics.median(times):.1%} apart in the median, at most {max(times):.1%}; "
            f"memory {statistics.median(memories):.1%}, at most {max(memories):.1%}."
        )


if __name__ == "__main__":
    main()
