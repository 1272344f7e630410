"""What ``accuracy.py`` trains, and one rank of one case: it plans, trains, and writes what came out."""

from __future__ import annotations

import json
import os
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bench.micro.operators import OPERATORS
from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune import coordinator, finalists, pipeline, profile_cache
from lightning_osdp.autotune.calibration import Calibration
from lightning_osdp.backend import agree, collectives, memory
from lightning_osdp.planning.search import search_space
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, enumerate_choices
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, Link
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.profiling import compute
from tests.support.zoo import ZOO

STEPS_S, FEWEST_STEPS, MOST_STEPS, QUICK_STEPS = 6.0, 7, 30, 5
"""How long to train: about so many seconds, but within these numbers of steps."""

SKIPPED = 3
"""First steps, which the strategy's clock leaves out."""


@dataclass(frozen=True)
class Subject:
    """A model large enough for a step of 0.2 to 1.5 s, and the batch sizes to train it at; 2 and 8 are profiled."""

    make: str
    sizes: dict[str, Any]
    batch_sizes: tuple[int, int] = (3, 6)
    optimizer: str = "AdamW"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


SUBJECTS = {
    "narrow and deep": Subject("stack", {"widths": (256,) * 16, "vocabulary": 2048, "length": 32}),
    "wide and shallow": Subject("stack", {"widths": (1024,) * 3, "vocabulary": 2048, "length": 32}),
    "inconsistent": Subject(
        "stack", {"widths": (192,) * 3 + (384,) * 3 + (768,) * 3 + (1024,), "vocabulary": 2048, "length": 32}
    ),
    "gpt2": Subject("gpt2", {"width": 384, "layers": 6, "vocabulary": 8192, "length": 64}),
    "llama": Subject("llama", {"width": 512, "layers": 6, "vocabulary": 8192, "length": 64}),
    "bert": Subject("bert", {"width": 384, "layers": 6, "vocabulary": 8192, "length": 64}),
    "t5": Subject("t5", {"width": 384, "layers": 4, "vocabulary": 8192, "length": 48}),
    "vit": Subject("vit", {"width": 384, "layers": 8, "size": 64, "patch": 8}),
    "swin": Subject("swin", {"width": 96, "depths": (2, 2, 4), "size": 64, "patch": 2, "window": 8}),
    "mixtral": Subject("mixtral", {"width": 256, "layers": 4, "experts": 8, "vocabulary": 8192, "length": 48}),
    "resnet": Subject("resnet", {"width": 64, "stages": 4, "size": 32}),
    "encoder": Subject("encoder", {"width": 512, "layers": 6, "vocabulary": 8192, "length": 64}),
    "lstm": Subject("lstm", {"width": 768, "layers": 3, "vocabulary": 8192, "length": 32}),
    "lora": Subject("lora", {"width": 768, "layers": 6, "rank": 16, "vocabulary": 8192, "length": 48}),
    "routed": Subject("routed", {"width": 768, "layers": 4, "experts": 4, "vocabulary": 8192, "length": 32}),
}

_BLOCKS = {"widths": (512,) * 6, "vocabulary": 4096, "length": 32}

OPTIONS = {
    "SGD": Subject("stack", _BLOCKS, optimizer="SGD"),
    "momentum": Subject("stack", _BLOCKS, optimizer="SGD", optimizer_options={"momentum": 0.9}),
    "Adam": Subject("stack", _BLOCKS, optimizer="Adam"),
    "Adafactor": Subject("stack", _BLOCKS, optimizer="Adafactor"),
    "foreach": Subject("stack", _BLOCKS, optimizer_options={"foreach": True}),
    "fused": Subject("stack", _BLOCKS, optimizer_options={"fused": True}),
    "accumulation": Subject("stack", _BLOCKS, trainer={"accumulate_grad_batches": 2}),
    "clipping": Subject("stack", _BLOCKS, trainer={"gradient_clip_val": 0.1}),
    "bf16-mixed": Subject("stack", _BLOCKS, trainer={"precision": "bf16-mixed"}),
}
"""Ways to train one model. For the memory above all: not part of the whole table."""

WIDTHS = (512, 1024, 2048, 4096)

SPLIT = {
    f"{kind} {width}": Subject(kind, {"width": width}, (4, 4), "SGD")
    for width in WIDTHS
    for kind in ("attention", "MLP")
}
"""What ``sliced_operator.py`` splits. SGD, so that the memory is that of weights and gradients."""

EVERYTHING = SUBJECTS | OPTIONS | SPLIT

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
    rounds_s: tuple[tuple[float, float], ...] = ()
    """Predicted and measured seconds of each round that this one was made of."""

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
        limit_bytes: memory limit per rank.
        folder: where measurements are kept between cases of a model, and where the result goes.
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
    log = os.open(f"{order.folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    names = {"WORLD_SIZE": order.ranks, "LOCAL_WORLD_SIZE": order.ranks, "RANK": rank, "LOCAL_RANK": rank}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": order.port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "accuracy"}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    # A case is predicted from measurements, not from the cases before it.
    instead(profile_cache, "store_correction", nothing)
    instead(coordinator, "find_cached_plan", nothing)  # nor is a plan for fewer modes the same problem
    note_allowances()
    slices = tuple(Mode(mode) for mode in order.slices or [order.plan] if order.plan != "searched")
    if slices:
        only(slices)
    hardware = guessed(order.ranks) if order.quick else None
    strategy = OSDPStrategy(
        batch_size=order.batch_size, memory_limit=order.limit_bytes, cache=order.folder, cluster=hardware
    )
    strategy.constraints = SearchConstraints(len(slices), order.recompute) if slices else SearchConstraints()
    train(strategy, order)
    tell(strategy, order)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way


def instead(module: Any, name: str, new: Any) -> None:
    """Puts ``new`` in the place of what ``module`` has under that name, for as long as this process lives.

    Raises:
        AttributeError: it has nothing of that name.
    """
    patch.object(module, name, new).start()


def nothing(*_: Any) -> None:
    """Does and finds nothing."""


def note_allowances() -> None:
    """Keeps what ``memory.growth_reserve`` says."""
    allowance = memory.growth_reserve

    def noted(*args: Any) -> int:
        ALLOWANCES.append(allowance(*args))
        return ALLOWANCES[-1]

    instead(memory, "growth_reserve", noted)


def tell(strategy: OSDPStrategy, order: Order) -> None:
    """The slowest rank's time and the largest peak, beside what was predicted."""
    plan, step, device = strategy.execution_plan, strategy.measured_step, strategy.root_device
    assert plan is not None
    assert plan.peak is not None
    assert step is not None
    numbers = (step.step_time_s, step.peak_memory_bytes)
    measured_s, peak_bytes = agree.all_reduce_max(numbers, dist.group.WORLD, device)
    baseline = plan.predicted.overhead_bytes - ALLOWANCES[-1]
    case = Case(
        order.model,
        order.plan,
        order.batch_size,
        predicted_s=plan.predicted.step_time_s,
        measured_s=measured_s,
        predicted_bytes=plan.predicted.peak_memory_bytes - baseline,
        # On CUDA the overhead is room for the caching allocator, which its own counter does not count.
        measured_bytes=int(peak_bytes) - (baseline if device.type == "cpu" else 0),
        baseline_bytes=baseline,
        where=plan.peak.where,
    )
    if dist.get_rank() == 0:
        (Path(order.folder) / "case.json").write_text(json.dumps(asdict(case)))


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


def train(strategy: OSDPStrategy, order: Order) -> None:
    """Some steps through the Trainer."""
    subject = EVERYTHING[order.model]
    torch.manual_seed(1)
    module = (ZOO | OPERATORS)[subject.make](**subject.sizes)
    made = getattr(torch.optim, subject.optimizer)
    module.optimizer = lambda module: made(
        [p for p in module.parameters() if p.requires_grad], lr=1e-4, **subject.optimizer_options
    )
    whole = module.batch(64)
    rows = [{key: value[index % 64] for key, value in whole.items()} for index in range(MOST_STEPS * 64)]
    trainer = L.Trainer(
        accelerator="auto",
        devices=order.ranks,
        strategy=strategy,
        max_steps=MOST_STEPS,
        callbacks=[Enough(order.quick)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **subject.trainer,
    )
    trainer.fit(module, DataLoader(rows, batch_size=4, collate_fn=_collated))


def _collated(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Enough(L.Callback):
    """Ends training after some steps, the same number on every rank: the first one's clock decides."""

    def __init__(self, quick: bool) -> None:
        self.steps = QUICK_STEPS if quick else MOST_STEPS
        self.quick = quick
        self.start = 0.0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        steps = trainer.global_step
        if steps == SKIPPED:
            self.start = time.perf_counter()
        elif steps == SKIPPED + 2 and not self.quick:
            each = torch.tensor((time.perf_counter() - self.start) / 2, device=trainer.strategy.root_device)
            dist.broadcast(each, 0)
            self.steps = SKIPPED + max(FEWEST_STEPS, min(MOST_STEPS, round(STEPS_S / float(each))))
        trainer.should_stop = steps >= self.steps
