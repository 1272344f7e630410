"""What ``accuracy.py`` trains, and one rank of one case: it plans, trains, and writes what came out."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bench.micro.operators import OPERATORS
from bench.processes import become_rank, write_log
from lightning_osdp import OSDPCallback, OSDPStrategy, plan
from lightning_osdp.autotune import coordinator, finalists, pipeline, profile_cache
from lightning_osdp.autotune.calibration import Calibration
from lightning_osdp.backend import agree, collectives
from lightning_osdp.backend.memory import memory_in_use
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.search import search_space
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, enumerate_choices
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.profiling import compute
from tests.support.families import FAMILIES, Sizes, build
from tests.support.zoo import ZooModule

STEPS, QUICK_STEPS = 30, 5
"""How many steps are made: the first ones of a start that found nothing in its cache."""

SEED, NUM_MODELS = 50, 22
"""The models are drawn by this seed."""

SHARES = {"ample": None, "middle": 0.6, "tight": 0.25}
"""Where the memory limit lies between the least that trains and what replicated training takes."""

LOADED_BYTES = 96 << 20
"""What a forked rank takes more, about, when it plans than when it begins: modules that it loads, and its own copies of
pages that it shared. It is added to the limit of the model."""

PACE_S = 0.5
"""How long the fixed work that tells the machine's pace is timed."""

PACE_NUMBERS = 4 << 20
"""Of a vector that no cache holds (16 MiB)."""


@dataclass(frozen=True)
class Subject:
    """A model, and how it is trained.

    Attributes:
        make: name of a family of transformers, or of operators.
        sizes: arguments of what makes it.
        batch_size: samples of each rank.
        limit: key of ``SHARES``.
        optimizer: name of its class in ``torch.optim``.
    """

    make: str
    sizes: dict[str, Any]
    batch_size: int = 4
    limit: str = "ample"
    optimizer: str = "AdamW"


def draw(seed: int, count: int) -> dict[str, Subject]:
    """Models, sizes, batch sizes and limits at random."""
    random = Random(seed)
    subjects = {}
    for name in random.sample(sorted(set(FAMILIES) - {"hf-resnet"}), count):  # the zoo has a ResNet
        pictures = any(part in FAMILIES[name].model for part in ("Image", "CLIP"))
        sizes = {
            "width": random.choice((192, 256) if pictures else (384, 512)),
            "layers": random.choice((3, 4)),
            "vocabulary": random.choice((4096, 8192)),
            "tokens": random.choice((32, 48)),
            "pixels": 64,
        }
        subjects[name] = Subject(name, sizes, random.choice((3, 5, 6)), random.choice(list(SHARES)))
    return subjects


SUBJECTS = draw(SEED, NUM_MODELS)

WIDTHS = (512, 1024, 2048, 4096)

SPLIT = {
    f"{kind} {width}": Subject(kind, {"width": width}, optimizer="SGD")
    for width in WIDTHS
    for kind in ("attention", "MLP")
}
"""What ``sliced_operator.py`` splits. SGD, so that the memory is that of weights and gradients."""

EVERYTHING = SUBJECTS | SPLIT

ALLOWANCES: list[int] = []
"""What the planner has added to the memory of this process for the first steps, latest last."""


@dataclass(frozen=True)
class Case:
    """What one run predicted and measured."""

    model: str
    plan: str
    batch_size: int
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    """Above the process's baseline, as ``measured_bytes``."""
    measured_bytes: int
    baseline_bytes: int
    where: str
    paces_s: tuple[float, ...] = (1.0,)
    """Seconds of fixed work before the start, before the first step and after the last one, on the slower rank."""
    runs: int = 1
    """How often it was run until the machine kept its pace."""

    @property
    def pace_change(self) -> float:
        """Relative change of the machine's own speed: the slowest pace by the fastest."""
        return max(self.paces_s) / min(self.paces_s) - 1

    @property
    def time_error(self) -> float:
        """Relative; above 0: predicted too long."""
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        """Relative; below 0: predicted too little."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class Order:
    """One case to run.

    Attributes:
        limit_bytes: memory limit per rank; of the model alone where the plan is searched.
        folder: where measurements are kept, and where the result goes.
        quick: the memory alone: few steps, and nothing is timed.
        slices: modes of every operator's slices; empty: as ``make_plan`` says.
        recompute: whether blocks are recomputed; they may be either where the plan is searched.
    """

    model: str
    plan: str
    batch_size: int
    limit_bytes: int
    folder: str
    ranks: int
    port: int
    quick: bool
    slices: tuple[str, ...] = ()
    recompute: bool = False


def work(rank: int, order: Order) -> None:
    """One rank, in a process of its own, which ends here: with 0 if all went well."""
    become_rank(rank, order.ranks, order.port, order.folder)
    torch.set_num_threads(1)
    note_allowances()
    if order.plan == "searched":
        wait_for_all_ranks(rank, order)  # a core's pace is another one while its neighbour idles
        paces_s = [pace_s()]
        limit = memory_in_use(torch.device("cpu")) + LOADED_BYTES + order.limit_bytes if order.limit_bytes else "auto"
        strategy = OSDPStrategy(batch_size=order.batch_size, memory_limit=limit, cache=order.folder)
    else:
        # A case is predicted from measurements, not from the cases before it.
        instead(profile_cache, "store_correction", nothing)
        instead(coordinator, "find_cached_plan", nothing)  # nor is a plan for fewer modes the same problem
        paces_s = []
        strategy = make_forced(order)
    train(strategy, order, [PaceTimer(paces_s)] if paces_s else [])
    tell(strategy, order, paces_s)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def make_forced(order: Order) -> OSDPStrategy:
    """The strategy that is left one choice for each operator."""
    slices = tuple(Mode(mode) for mode in order.slices or [order.plan])
    only(slices)
    hardware = guessed(order.ranks) if order.quick else None
    strategy = OSDPStrategy(
        batch_size=order.batch_size, memory_limit=order.limit_bytes, cache=order.folder, cluster=hardware
    )
    strategy.constraints = SearchConstraints(len(slices), order.recompute)
    return strategy


def wait_for_all_ranks(rank: int, order: Order) -> None:
    """Returns when each rank has come here; there is no process group yet."""
    folder = Path(order.folder)
    (folder / f"ready-{rank}").touch()
    while len(list(folder.glob("ready-*"))) < order.ranks:
        time.sleep(0.01)


def pace_s() -> float:
    """Seconds of a fixed matrix product and a fixed sum, which takes as long: the machine's own pace.

    All ranks are at work, and nothing is allocated meanwhile. Other work on a machine may slow down its cores, or what
    they read and write in memory.
    """
    a, product = torch.ones(384, 384), torch.empty(384, 384)
    vector, total = torch.ones(PACE_NUMBERS), torch.zeros(PACE_NUMBERS)
    seconds = []
    end = time.perf_counter() + PACE_S
    while (start := time.perf_counter()) < end:
        torch.mm(a, a, out=product)
        torch.add(vector, vector, out=total)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def scout(order: Order) -> None:
    """Write the least memory of the model alone that trains, and what it takes replicated, on hardware not measured."""
    write_log(f"{order.folder}/scout.log")
    torch.set_num_threads(1)
    instead(coordinator, "process_overhead", lambda *_: 0)
    hardware = guessed(order.ranks)
    module, rows = subject_of(order)
    options: dict[str, Any] = {"cluster": hardware, "trial_steps": False, "batch_size": order.batch_size, "cache": ""}
    data = DataLoader(rows[:64], batch_size=order.batch_size, collate_fn=collate)
    try:
        plan(module, data, memory_limit=1, **options)
    except InfeasibleError as error:
        least = error.needed_bytes
    replicated = plan(module, data, memory_limit=1 << 40, callback=OSDPCallback(modes="dp"), **options)
    found = {"least": least, "replicated": replicated.predicted.max_memory_bytes}
    (Path(order.folder) / "limits.json").write_text(json.dumps(found))


def instead(module: Any, name: str, new: Any) -> None:
    """Puts ``new`` in the place of what ``module`` has under that name, for as long as this process lives.

    Raises:
        AttributeError: it has nothing of that name.
    """
    patch.object(module, name, new).start()


def nothing(*_: Any) -> None:
    """Does and finds nothing."""


def note_allowances() -> None:
    """Keeps what the planner reserves for what grows after it (``growth_reserve``)."""
    allowance = coordinator.growth_reserve

    def noted(*args: Any) -> int:
        ALLOWANCES.append(allowance(*args))
        return ALLOWANCES[-1]

    instead(coordinator, "growth_reserve", noted)


def tell(strategy: OSDPStrategy, order: Order, paces_s: Sequence[float]) -> None:
    """The slowest rank's time and the largest peak, beside what was predicted."""
    made, step, device = strategy.execution_plan, strategy.measured_step, strategy.root_device
    assert made is not None
    assert made.peak is not None
    assert step is not None
    numbers = (step.step_time_s, step.peak_memory_bytes, *paces_s)
    measured_s, peak_bytes, *paces = agree.all_reduce_max(numbers, dist.group.WORLD, device)
    baseline = made.predicted.overhead_bytes - ALLOWANCES[-1]
    case = Case(
        order.model,
        named(made) if order.plan == "searched" else order.plan,
        order.batch_size,
        predicted_s=made.predicted.step_time_s,
        measured_s=measured_s,
        predicted_bytes=made.predicted.peak_memory_bytes - baseline,
        # On CUDA the overhead is room for the caching allocator, which its own counter does not count.
        measured_bytes=int(peak_bytes) - (baseline if device.type == "cpu" else 0),
        baseline_bytes=baseline,
        where=made.peak.where,
        paces_s=tuple(paces) or (1.0,),
    )
    if dist.get_rank() == 0:
        (Path(order.folder) / "case.json").write_text(json.dumps(asdict(case)))


def named(made: ExecutionPlan) -> str:
    """In short: parameters by mode, recomputed blocks, and whether freed memory is retained."""
    shares = dict.fromkeys(Mode, 0.0)
    for operator in made.operators:
        for mode in operator.slices:
            shares[mode] += operator.num_parameters / len(operator.slices) / made.model.num_parameters
    text = ", ".join(f"{mode.value} {share:.0%}" for mode, share in shares.items() if share >= 0.005)
    text += f", {len(made.recomputed)} recomputed" if made.recomputed else ""
    return (
        text + (", in backward" if made.update_in_backward else "") + (", retained" if made.retain_freed_memory else "")
    )


def only(slices: tuple[Mode, ...]) -> None:
    """Leaves the planner one choice for each operator: these slices, or what comes nearest to them."""

    def nearest(operator: Any, *args: Any) -> list[ShardingChoice]:
        rows = enumerate_choices(operator, *args)
        wanted = [row for row in rows if row.slices == slices]
        whole = [row for row in rows if len(row.slices) == 1]
        alike = [row for row in whole if row.slices[0] == slices[0]]
        return (wanted or alike or whole[-1:])[:1]

    instead(search_space, "enumerate_choices", nearest)


def guessed(ranks: int) -> Cluster:
    """Hardware that is not measured: its times mean nothing, but the memory along the step does not depend on them."""
    instead(compute, "KERNEL_TIMING_BUDGET_S", 0.0)
    instead(pipeline, "run_calibration_trials", lambda setup, compute: Calibration(compute))
    instead(finalists, "run_plan_trials", lambda *_: [])
    fit = CollectiveFit(latency_s=1e-3, s_per_byte=1e-9)
    link = Link(all_reduce=fit, all_gather=fit, reduce_scatter=fit)
    return Cluster(
        devices_per_node=ranks,
        device="cpu",
        backend="gloo",
        link=link,
        reduce_scatter_copy_factor=collectives.reduce_scatter_copy_factor("gloo", ranks),
        reduce_scatter_buffer_bytes=collectives.reduce_buffer_bytes("gloo", ranks),
        all_reduce_buffer_bytes=collectives.all_reduce_buffer_bytes("gloo", ranks),
    )


def subject_of(order: Order) -> tuple[ZooModule, list[dict[str, torch.Tensor]]]:
    """The module and its samples."""
    subject = EVERYTHING[order.model]
    torch.manual_seed(1)
    operators = OPERATORS.get(subject.make)
    module = operators(**subject.sizes) if operators else build(subject.make, Sizes(**subject.sizes))
    made = getattr(torch.optim, subject.optimizer)
    module.optimizer = lambda module: made([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    whole = module.batch(64)
    return module, [{key: value[index % 64] for key, value in whole.items()} for index in range(STEPS * 64)]


class PaceTimer(L.Callback):
    """Adds the machine's pace before the first step, and after the last one."""

    def __init__(self, paces_s: list[float]) -> None:
        self._paces_s = paces_s

    def on_train_start(self, *_: Any) -> None:
        self._paces_s.append(pace_s())

    on_train_end = on_train_start


def train(strategy: OSDPStrategy, order: Order, callbacks: Sequence[L.Callback] = ()) -> None:
    """Some steps through the Trainer."""
    module, rows = subject_of(order)
    trainer = L.Trainer(
        accelerator="auto",
        devices=order.ranks,
        strategy=strategy,
        callbacks=list(callbacks),
        max_steps=QUICK_STEPS if order.quick else STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=order.batch_size, collate_fn=collate))


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
