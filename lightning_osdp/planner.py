"""Module + batch + hardware -> plan: joins profiling and planning, and keeps the cache of measurements."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_osdp import collectives
from lightning_osdp.errors import ConfigurationError, OSDPWarning, PlanMismatchError, TraceError
from lightning_osdp.levels import Levels as LevelGroups
from lightning_osdp.levels import node_layout
from lightning_osdp.planning.caching_allocator import margin_bytes, staying_tensors
from lightning_osdp.planning.calibration import Correction, corrected_cluster, corrected_compute
from lightning_osdp.planning.cluster import (
    NO_OVERHEAD,
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    Levels,
    Link,
)
from lightning_osdp.planning.operators import Frozen
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.schedule import BatchRule, Problem, make_plan
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from lightning_osdp.profiling import compute, network
from lightning_osdp.profiling.memory import control_group, overhead
from lightning_osdp.profiling.trace import Trace, trace, trace_real
from lightning_osdp.sharding import overhead as engine_overhead

Result = TypeVar("Result")

PROBE_TOLERANCE = 3.0
"""Cached measurements of the network are used only if a fresh all-gather agrees with them within this factor: the same
host may reach its peers over another link today. Busy machines are off by a factor of 2 at times."""


NO_LINK = Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
"""Of a single rank, or of ranks that are not measured yet."""


NO_CORRECTION = Correction()
"""Of measurements that no run has followed yet."""


class Measurements(Frozen):
    """What is kept on disk between runs."""

    link: Link
    levels: Levels | None = None
    """Where there are several nodes of several ranks."""
    compute: ComputeTimes
    engine: EngineOverhead = NO_OVERHEAD
    correction: Correction = NO_CORRECTION
    """What runs with these measurements have taught since."""


@dataclass(frozen=True)
class Ranks:
    """The processes that train together.

    Attributes:
        group: their process group.
        nodes: machines with equally many of them; 1 if they differ.
        device: this rank's device.
        uneven: ranks of each machine, if they differ.
    """

    group: Any
    nodes: int
    device: torch.device
    uneven: tuple[int, ...] = ()

    @classmethod
    def on_nodes(cls, group: Any, node_rank: int, device: torch.device) -> Ranks:
        """Asks all ranks which machine they are on. Collective."""
        sizes, even = node_layout(group, node_rank)
        if even:
            return cls(group, len(sizes), device)
        if group.rank() == 0:
            warnings.warn(
                f"ranks are spread over nodes as {', '.join(map(str, sizes))} (in the order of ranks): operators are "
                "sharded over all ranks only. Sharding inside nodes needs equally many on each, numbered node by node",
                OSDPWarning,
                stacklevel=2,
            )
        return cls(group, 1, device, uneven=sizes)

    @property
    def two_levels(self) -> bool:
        """Whether a machine has neither one of them nor all."""
        return 1 < self.nodes < self.count

    @property
    def count(self) -> int:
        """How many there are."""
        return int(self.group.size())

    @property
    def is_first(self) -> bool:
        """Whether this rank plans and prints."""
        return int(self.group.rank()) == 0


@dataclass(frozen=True)
class Outcome:
    """A plan and how it came about."""

    plan: ExecutionPlan
    profiling_s: float | None = None
    """Seconds that measuring took; None if the plan was there already."""
    from_cache: bool = False
    correction: Correction = NO_CORRECTION
    """That the plan was predicted with."""
    file: Path | None = None
    """Where the measurements are kept, on the first rank."""
    again: Callable[[Correction, BatchRule], ExecutionPlan] | None = None
    """Plans from the same measurements, but corrected; collective. None if nothing was measured."""
    problem: Problem | None = None
    """What the plan solves, where it was made without a process group."""


def on_all_ranks(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """See ``collectives.on_all_ranks``."""
    return collectives.on_all_ranks(ranks.group, work)


def describe(
    module: pl.LightningModule,
    batch: Any,
    batch_size: int,
    device: torch.device,
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Trace:
    """Reads the module's training step on fake tensors, or by one real step on a small batch where it can't be."""
    try:
        return trace(module, batch, batch_size, device=device, step_context=step_context)
    except TraceError as error:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise  # a module without values can't run for real
        warnings.warn(
            f"training_step can't be traced on fake tensors ({error}); one real step on a small batch is run instead",
            OSDPWarning,
            stacklevel=2,
        )
    where = next(module.parameters()).device  # on CUDA the module is still on the host, where the step runs as well
    return trace_real(module, batch, batch_size, device=where, step_context=step_context)


def measure_and_plan(
    traced: Trace,
    ranks: Ranks,
    rule: BatchRule,
    memory_limit_bytes: int,
    model_bytes: int,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    wishes: Wishes = NO_WISHES,
) -> Outcome:
    """Measures what is not known yet and plans on the first rank; the same plan comes back on every rank.

    Args:
        traced: the model, the same on every rank.
        ranks: who trains together.
        rule: which batch sizes to try.
        memory_limit_bytes: per device; the smallest over the ranks counts.
        model_bytes: of parameters and buffers on the device now.
        cluster: hardware that is known already; its links are not measured.
        cache: folder of measurements; None to keep none.
        wishes: what is not left to the search.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: ``cluster`` has another number of ranks, the batch sizes contradict each other, or a wish
            matches nothing.
    """
    if cluster is not None and cluster.ranks != ranks.count:
        raise ConfigurationError(f"cluster describes {cluster.ranks} ranks, this run has {ranks.count}")
    start = time.monotonic()
    measured, from_cache, file = _measurements(traced, ranks, cluster, cache, wishes)
    profiling_s = time.monotonic() - start
    numbers = torch.tensor([-memory_limit_bytes, not_for_the_model(traced, ranks.device, model_bytes)])
    numbers = numbers.to(ranks.device)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=ranks.group)
    limit, used = -int(numbers[0]), int(numbers[1])

    def decide(correction: Correction, rule: BatchRule) -> ExecutionPlan:
        known = measured.model_copy(update={"correction": correction})

        def first_rank() -> str:
            if not ranks.is_first:
                return ""
            hardware = cluster or this_cluster(ranks, known.link, known.levels, known.engine)
            return make_plan(_problem(traced, hardware, known, limit, used, wishes), rule).to_json()

        text = [on_all_ranks(ranks, first_rank)]
        dist.broadcast_object_list(text, src=dist.get_global_rank(ranks.group, 0), group=ranks.group)
        return ExecutionPlan.from_json(text[0])

    plan = decide(measured.correction, rule)
    return Outcome(plan, profiling_s, from_cache, measured.correction, file, again=decide)


def remember(file: Path, correction: Correction) -> None:
    """Stores what a run has taught with the measurements that its plan was made from."""
    known = _read(file)
    if known is not None:
        _write(file, known.model_copy(update={"correction": correction}).model_dump_json())


def sharers(ranks: Ranks) -> int:
    """How many ranks are in this one's control group, and so share its limit. Collective."""
    here = (platform.node(), control_group() if ranks.device.type == "cpu" else "")
    everyone: list[Any] = [None] * ranks.count
    dist.all_gather_object(everyone, here, group=ranks.group)
    return everyone.count(here)


def still_right(
    plan: ExecutionPlan | None,
    traced: Trace,
    ranks: Ranks,
    rule: BatchRule,
    memory_limit_bytes: int,
) -> ExecutionPlan | None:
    """The first rank's ``plan`` on every rank, if a run like this one made it; else None on every rank.

    It must be for this model, this kind and number of devices, within the memory limit, and with a batch size that
    ``rule`` allows.
    """
    text = [plan.to_json() if plan is not None and ranks.is_first else None]
    dist.broadcast_object_list(text, src=dist.get_global_rank(ranks.group, 0), group=ranks.group)
    limit = torch.tensor(-memory_limit_bytes, device=ranks.device)
    dist.all_reduce(limit, op=dist.ReduceOp.MAX, group=ranks.group)
    if text[0] is None:
        return None
    earlier = ExecutionPlan.from_json(text[0])
    here, there = this_cluster(ranks, NO_LINK), earlier.cluster
    try:
        earlier.check(traced.description, ranks.count)
    except PlanMismatchError:
        return None
    same = all(getattr(here, name) == getattr(there, name) for name in ("nodes", "device", "backend"))
    fits = earlier.predicted.peak_memory_bytes <= -int(limit)
    allowed = (earlier.batch_size, earlier.accumulate_grad_batches) in set(rule.pairs(ranks.count))
    return earlier if same and fits and allowed else None


def _problem(
    traced: Trace, cluster: Cluster, measured: Measurements, limit_bytes: int, overhead_bytes: int, wishes: Wishes
) -> Problem:
    correction = measured.correction
    return Problem(
        traced.description,
        corrected_cluster(cluster, correction),
        corrected_compute(measured.compute, correction),
        limit_bytes,
        max(0, overhead_bytes + correction.memory_bytes),
        wishes,
    )


def plan_alone(
    traced: Trace,
    cluster: Cluster,
    device: torch.device,
    rule: BatchRule,
    memory_limit_bytes: int,
    model_bytes: int,
    *,
    cache: Path | None = None,
    wishes: Wishes = NO_WISHES,
) -> Outcome:
    """Plans for a known cluster in this one process, without a process group.

    Compute is measured here, on a device that the other ranks don't use meanwhile; measurements that such ranks made
    together on this machine are preferred where the cache has them.

    Args:
        traced: the model.
        cluster: the hardware to plan for.
        device: a device of that hardware.
        rule: which batch sizes to try.
        memory_limit_bytes: per device.
        model_bytes: of parameters and buffers on the device now.
        cache: folder of measurements; None to keep none.
        wishes: what is not left to the search.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: a wish matches nothing, or the batch sizes contradict each other.
    """
    start = time.monotonic()
    files = [cache / f"{_key(traced, device, cluster, wishes, alone)}.json" for alone in (False, True)] if cache else []
    known = next((found for found in map(_read, files) if found is not None), None)
    if known is None:
        with progress(True, ("compute",)) as advance:
            shown = partial(advance, "compute")
            times = compute.measure(traced, device, progress=shown, wishes=wishes)
        known, from_cache = Measurements(link=cluster.link, levels=cluster.levels, compute=times), False
        if files:
            _write(files[-1], known.model_dump_json())
    else:
        compute.warm_up(traced, device)
        from_cache = True
    profiling_s = time.monotonic() - start
    used = not_for_the_model(traced, device, model_bytes)
    problem = _problem(traced, cluster, known, memory_limit_bytes, used, wishes)
    return Outcome(make_plan(problem, rule), profiling_s, from_cache, known.correction, problem=problem)


def not_for_the_model(traced: Trace, device: torch.device, model_bytes: int) -> int:
    """The process's own memory, and on CUDA what the caching allocator can't use of the segments that it takes."""
    margin = margin_bytes(staying_tensors(traced.description)) if device.type == "cuda" else 0
    return overhead(device, model_bytes) + margin


def this_cluster(
    ranks: Ranks, link: Link, levels: Levels | None = None, engine: EngineOverhead = NO_OVERHEAD
) -> Cluster:
    """The hardware that this run is on, with its links and the engine's overhead as measured."""
    backend = dist.get_backend(ranks.group)
    return Cluster(
        nodes=ranks.nodes,
        devices_per_node=ranks.count // ranks.nodes,
        uneven=ranks.uneven,
        device=device_name(ranks.device),
        backend=backend,
        link=link,
        levels=levels,
        reduce_copy=collectives.reduce_copy(backend, ranks.count),
        engine=engine,
    )


def device_name(device: torch.device) -> str:
    """As a cluster names it: ``cpu``, ``cuda: NVIDIA H200``."""
    return "cpu" if device.type == "cpu" else f"cuda: {torch.cuda.get_device_name(device)}"


def cache_folder(cache: str | Path | None) -> Path | None:
    """Where a user's ``cache`` argument keeps measurements: None is the default folder, the empty text none."""
    if cache is None:
        return default_cache()
    return Path(cache) if str(cache) else None


def default_cache() -> Path:
    """Where measurements are kept: ``$LIGHTNING_OSDP_CACHE``, else the user's cache folder."""
    own = os.environ.get("LIGHTNING_OSDP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "lightning_osdp"


def _measurements(
    traced: Trace, ranks: Ranks, cluster: Cluster | None, cache: Path | None, wishes: Wishes
) -> tuple[Measurements, bool, Path | None]:
    here = this_cluster(ranks, NO_LINK)
    file = cache / f"{_key(traced, ranks.device, here, wishes)}.json" if cache is not None else None
    known = [_read(file) if ranks.is_first and file is not None else None]
    dist.broadcast_object_list(known, src=dist.get_global_rank(ranks.group, 0), group=ranks.group)
    stored = known[0]
    if stored is not None and (cluster is not None or _still_true(stored, ranks)):
        on_all_ranks(ranks, lambda: compute.warm_up(traced, ranks.device))
        engine_overhead.warm_up(ranks.group, ranks.device)
        return stored, True, file
    with progress(ranks.is_first, ("network", "compute")) as advance:
        link, levels = (cluster.link, cluster.levels) if cluster is not None else measure_links(ranks, advance)
        times = on_all_ranks(
            ranks,
            lambda: compute.measure(traced, ranks.device, progress=partial(advance, "compute"), wishes=wishes),
        )
    engine_overhead.warm_up(ranks.group, ranks.device)
    engine = cluster.engine if cluster is not None else engine_overhead.measure(ranks.group, ranks.device)
    measured = Measurements(link=link, levels=levels, compute=_slowest(times, ranks), engine=engine)
    if ranks.is_first and file is not None:
        _write(file, measured.model_dump_json())
    return measured, False, file


def measure_links(ranks: Ranks, advance: Callable[[str, int, int], None]) -> tuple[Link, Levels | None]:
    """The links of all ranks together, and those of nodes where there are two levels. Collective."""
    kinds = 2 if ranks.two_levels else 1

    def link_progress(done: int, total: int) -> None:
        advance("network", done, kinds * total)

    def levels_progress(done: int, total: int) -> None:
        advance("network", total + done, 2 * total)

    link = network.measure(ranks.group, ranks.device, progress=link_progress)
    if not ranks.two_levels:
        return link, None
    groups = LevelGroups.of(ranks.group, ranks.nodes)
    levels = network.measure_levels(groups, ranks.device, progress=levels_progress)
    groups.destroy()
    return link, levels


def _slowest(times: ComputeTimes, ranks: Ranks) -> ComputeTimes:
    """Of all ranks' measurements, those of the one that takes longest: the others wait for it."""
    everyone: list[Any] = [None] * ranks.count
    dist.all_gather_object(everyone, times, group=ranks.group)

    def total(one: ComputeTimes) -> float:
        return sum(line.at(8) for line in [*one.operators, one.outside])

    return max(everyone, key=total)  # type: ignore[no-any-return]


def _still_true(known: Measurements, ranks: Ranks) -> bool:
    """Whether all that is needed was measured, and one all-gather takes about as long as the cached fit says."""
    if ranks.two_levels and known.levels is None:
        return False
    if ranks.count == 1:
        return True
    part = torch.zeros((4 << 20) // 4 // ranks.count, device=ranks.device)
    whole = torch.empty(part.numel() * ranks.count, device=ranks.device)
    seconds = []
    for _ in range(4):
        dist.barrier(group=ranks.group)
        start = time.perf_counter()
        collectives.all_gather(whole, part, ranks.group)
        if ranks.device.type == "cuda":
            torch.cuda.synchronize(ranks.device)
        seconds.append(time.perf_counter() - start)
    taken = torch.tensor(min(seconds[1:]), device=ranks.device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX, group=ranks.group)
    expected = known.link.all_gather.time_s(4 << 20, ranks.count)
    return expected <= PROBE_TOLERANCE * float(taken) and float(taken) <= PROBE_TOLERANCE * expected


def _key(traced: Trace, device: torch.device, cluster: Cluster, wishes: Wishes, alone: bool = False) -> str:
    """Fingerprint of hardware, versions and model: measurements are valid for exactly this.

    Args:
        traced: the model.
        device: that is measured.
        cluster: number of ranks and backend count, not its links.
        wishes: say which ways to split operators are measured.
        alone: whether one process measures, while no other rank uses the same machine.
    """
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    facts = {
        "host": platform.node(),
        "device": name,
        "ranks": [cluster.ranks, cluster.nodes, *cluster.uneven],
        "threads": torch.get_num_threads(),
        "backend": cluster.backend,
        "torch": torch.__version__,
        "model": traced.description.fingerprint,
        "step": traced.description.model_dump_json(),
        "slices": str(wishes.slice_granularity),
    }
    if alone:
        facts["alone"] = True
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _read(file: Path) -> Measurements | None:
    if not file.exists():
        return None
    try:
        return Measurements.model_validate_json(file.read_text())
    except ValidationError:
        warnings.warn(f"{file} is damaged and will be measured anew", OSDPWarning, stacklevel=2)
        return None


def _write(file: Path, text: str) -> None:
    """Written whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(text)
        Path(temporary.name).replace(file)
    except OSError as error:
        warnings.warn(f"measurements can't be kept in {file.parent}: {error}", OSDPWarning, stacklevel=2)


@contextmanager
def progress(shown: bool, names: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each kind of measurement, on the standard error stream, if ``shown``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        tasks = {name: bars.add_task(f"measuring the {name}", total=None) for name in names}

        def advance(name: str, done: int, total: int) -> None:
            bars.update(tasks[name], completed=done, total=total)

        yield advance
