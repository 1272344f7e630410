"""What is measured of hardware and model before planning, on all ranks together, and kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.autotune.trials import run_calibration_trials
from lightning_osdp.backend import collectives
from lightning_osdp.backend.agree import broadcast_object, raise_on_all_ranks
from lightning_osdp.backend.hierarchical import NodeGroups as LevelGroups
from lightning_osdp.backend.hierarchical import detect_node_layout
from lightning_osdp.backend.memory import control_group
from lightning_osdp.backend.timer import CORE_SHARING
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.cost.run_correction import Correction
from lightning_osdp.planning.cost.trial_correction import Trial
from lightning_osdp.planning.search.plan_selection import CachedPlan
from lightning_osdp.planning.spec.cluster import (
    NO_ENGINE_OVERHEAD,
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    HierarchicalLinks,
    Link,
)
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import FrozenModel, ModelProfile
from lightning_osdp.profiling import compute, engine_overhead, network
from lightning_osdp.profiling.kernels.benchmark import KernelTimes
from lightning_osdp.profiling.tracing.trace import TracedStep

LARGEST_TENSOR_DIVISOR = 3
"""Of the memory that is free, the largest tensor that links are measured with takes one part in so many: there are two
of it."""

MAX_TIMING_RANKS = 8
"""Most ranks that share the timing of kernels, neighbours by their numbers."""

PROBE_BYTES = 4 << 20
PROBE_TOLERANCE = 3.0
"""Cached measurements of the network are used only if a fresh all-gather agrees with them within this factor: the same
host may reach its peers over another link today. Busy machines are off by a factor of 2 at times."""

CACHE_VERSION = 13
"""Of what is kept. To be raised when what is measured changes its meaning: older files are left alone then."""

NO_LINK = Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
"""Of a single rank, or of ranks that are not measured yet."""

NO_CORRECTION = Correction()
"""Of measurements that no run has followed yet."""


class ClusterProfile(FrozenModel):
    """What is measured of the ranks, whatever they train."""

    link: Link
    hierarchical_links: HierarchicalLinks | None = None
    """Where there are several nodes of several ranks."""
    engine: EngineOverhead = NO_ENGINE_OVERHEAD


class Profile(ClusterProfile):
    """All that a plan is made from."""

    compute: ComputeTimes
    trials: tuple[Trial, ...] = ()
    """Of whole steps, with these measurements."""
    compute_with_retained_heap: ComputeTimes | None = None
    """``compute`` where freed tensors stay in the heap; None where they can't or must not, or where it was not looked
    for."""
    cached_plans: tuple[CachedPlan, ...] = ()
    """What starts with these measurements have come to."""
    correction: Correction = NO_CORRECTION
    """What runs with these measurements have taught since."""


ProfileT = TypeVar("ProfileT", bound=ClusterProfile)
FrozenT = TypeVar("FrozenT", bound=FrozenModel)


@dataclass(frozen=True)
class ModelProfileCache:
    """What was read of training steps, kept in a folder (``trace.ModelProfileStore``)."""

    folder: Path

    def contains(self, architecture_key: str) -> bool:
        """Whether there are some of modules that look so (``trace.architecture_key``)."""
        return next(self.folder.glob(f"step-{architecture_key}-*.json"), None) is not None

    def load(self, key: str) -> ModelProfile | None:
        """None if there is none."""
        return read(self._file(key), ModelProfile)

    def save(self, key: str, model_profile: ModelProfile) -> None:
        """Every rank writes the same: they may be on machines that share no folder."""
        write(self._file(key), model_profile.model_dump_json())

    def _file(self, key: str) -> Path:
        return self.folder / f"step-{key}.json"


@dataclass(frozen=True)
class RankGroup:
    """The processes that train together.

    Attributes:
        group: their process group.
        nodes: machines with equally many of them; 1 if they differ.
        device: this rank's device.
        devices_by_node: ranks of each machine, if they differ.
    """

    group: Any
    nodes: int
    device: torch.device
    devices_by_node: tuple[int, ...] = ()

    @classmethod
    def from_node_rank(cls, group: Any, node_rank: int, device: torch.device) -> RankGroup:
        """Asks all ranks which machine they are on. Collective."""
        sizes, even = detect_node_layout(group, node_rank)
        if even:
            return cls(group, len(sizes), device)
        if group.rank() == 0:
            warnings.warn(
                f"ranks are spread over nodes as {', '.join(map(str, sizes))} (in the order of ranks): operators are "
                "sharded over all ranks only. Sharding inside nodes needs equally many on each, numbered node by node",
                OSDPWarning,
                stacklevel=2,
            )
        return cls(group, 1, device, devices_by_node=sizes)

    @property
    def is_hierarchical(self) -> bool:
        """Whether a machine has neither one of them nor all."""
        return 1 < self.nodes < self.world_size

    @property
    def world_size(self) -> int:
        """How many there are."""
        return int(self.group.size())

    @property
    def is_rank_zero(self) -> bool:
        """Whether this rank plans and prints."""
        return int(self.group.rank()) == 0


def ranks_sharing_memory_limit(rank_group: RankGroup) -> int:
    """How many ranks are in this one's control group, and so share its limit. Collective."""
    return _count_equal_ranks((platform.node(), control_group(rank_group.device)), rank_group)


def _count_equal_ranks(value: object, rank_group: RankGroup) -> int:
    """How many ranks have what there is ``value``. Collective."""
    everyone: list[Any] = [None] * rank_group.world_size
    dist.all_gather_object(everyone, value, group=rank_group.group)
    return everyone.count(value)


def current_cluster(
    rank_group: RankGroup,
    link: Link,
    hierarchical_links: HierarchicalLinks | None = None,
    engine: EngineOverhead = NO_ENGINE_OVERHEAD,
) -> Cluster:
    """The hardware that this run is on, with its links and the engine's overhead as measured."""
    backend, kind = collectives.backend_of(rank_group.group, rank_group.device), rank_group.device.type
    return Cluster(
        nodes=rank_group.nodes,
        devices_per_node=rank_group.world_size // rank_group.nodes,
        devices_by_node=rank_group.devices_by_node,
        device=device_name(rank_group.device),
        backend=backend,
        link=link,
        hierarchical_links=hierarchical_links,
        reduce_scatter_copy_factor=collectives.reduce_scatter_copy_factor(backend, rank_group.world_size, kind),
        reduce_scatter_buffer_bytes=collectives.reduce_buffer_bytes(backend, rank_group.world_size, kind),
        all_reduce_buffer_bytes=collectives.all_reduce_buffer_bytes(backend, rank_group.world_size, kind),
        engine=engine,
    )


def resolve_cluster(rank_group: RankGroup, cluster: Cluster | None, cluster_profile: ClusterProfile) -> Cluster:
    """The cluster that was given, or this run's, with its engine as it is known."""
    found = cluster or current_cluster(rank_group, cluster_profile.link, cluster_profile.hierarchical_links)
    return found.model_copy(update={"engine": cluster_profile.engine})


def device_name(device: torch.device) -> str:
    """As a cluster names it: ``cpu``, ``cuda: NVIDIA H200``."""
    return "cpu" if device.type == "cpu" else f"cuda: {torch.cuda.get_device_name(device)}"


def cache_folder(cache: str | Path | None) -> Path | None:
    """Where a user's ``cache`` argument keeps measurements: None is the default folder, the empty text none."""
    if cache is None:
        return default_cache_folder()
    return Path(cache) if str(cache) else None


def default_cache_folder() -> Path:
    """Where measurements are kept: ``$LIGHTNING_OSDP_CACHE``, else the user's cache folder."""
    own = os.environ.get("LIGHTNING_OSDP_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "lightning_osdp"


def load_or_measure(
    traced: TracedStep,
    rank_group: RankGroup,
    cluster: Cluster | None,
    cache: Path | None,
    constraints: SearchConstraints,
    free_bytes: Callable[[], int],
    trial_context: TrialContext | None,
    remaining_s: Callable[[], float],
) -> tuple[Profile, bool, Path | None]:
    """Measurements, whether the cache had them, and the file that keeps them (on the first rank). Collective.

    Args:
        traced: the model.
        rank_group: who trains together.
        cluster: hardware that is known already.
        cache: folder of measurements.
        constraints: what is not left to the search.
        free_bytes: that this rank may take now.
        trial_context: to rehearse the step on; None to leave it at the parts.
        remaining_s: seconds that the start may still take. Collective.
    """
    if rank_group.device.type == "cpu":
        CORE_SHARING.set_process_count(_count_equal_ranks(CORE_SHARING.key(), rank_group))
    here = current_cluster(rank_group, NO_LINK)
    file = cache / f"{cache_key(traced, rank_group.device, here, constraints)}.json" if cache is not None else None
    stored = _load_on_rank0(file, Profile, rank_group)
    engine_overhead.warm_up(rank_group.group, rank_group.device)
    if stored is not None and (cluster is not None or _is_cache_valid(stored, rank_group)):
        return stored, True, file
    traced, room_bytes = raise_on_all_ranks(rank_group.group, traced.with_all_kernels), free_bytes()
    with show_progress(rank_group.is_rank_zero, ("network", "compute")) as advance:
        connections = _load_or_measure_links(rank_group, cluster, cache, advance, room_bytes)
        parts = times = _measure_compute_times(traced, rank_group, constraints, partial(advance, "compute"), room_bytes)
    measured = Profile(**dict(connections), compute=parts)
    if trial_context is not None:
        known = resolve_cluster(rank_group, cluster, measured)
        times, kept, rehearsals = run_calibration_trials(
            trial_context, traced, rank_group.group, known, parts, free_bytes, remaining_s
        )
        measured = measured.model_copy(
            update={"compute": times, "trials": rehearsals, "compute_with_retained_heap": kept}
        )
    if times is parts:  # no step was made, and each rank has run but its share of the kernels
        raise_on_all_ranks(rank_group.group, lambda: compute.warm_up(traced, rank_group.device))
    if rank_group.is_rank_zero and file is not None:
        write(file, measured.model_dump_json())
    return measured, False, file


def _load_on_rank0(file: Path | None, kind: type[ProfileT], rank_group: RankGroup) -> ProfileT | None:
    """What the first rank's disk holds, on every rank."""
    return broadcast_object(
        rank_group.group, read(file, kind) if rank_group.is_rank_zero and file is not None else None
    )


def _load_or_measure_links(
    rank_group: RankGroup,
    cluster: Cluster | None,
    cache: Path | None,
    advance: Callable[[str, int, int], None],
    available_bytes: int,
) -> ClusterProfile:
    """As given, as they were measured for another model, or measured now. Collective."""
    if cluster is not None:
        return ClusterProfile(link=cluster.link, hierarchical_links=cluster.hierarchical_links, engine=cluster.engine)
    here = current_cluster(rank_group, NO_LINK)
    file = cache / f"ranks-{_hash(_cache_key_fields(rank_group.device, here))}.json" if cache is not None else None
    stored = _load_on_rank0(file, ClusterProfile, rank_group)
    if stored is not None and _is_cache_valid(stored, rank_group):
        return stored
    link, levels = measure_links(rank_group, advance, available_bytes)
    engine = engine_overhead.measure_engine_overhead(
        rank_group.group, rank_group.device, current_cluster(rank_group, link, levels), available_bytes
    )
    connections = ClusterProfile(link=link, hierarchical_links=levels, engine=engine)
    if rank_group.is_rank_zero and file is not None:
        write(file, connections.model_dump_json())
    return connections


def measure_links(
    rank_group: RankGroup, advance: Callable[[str, int, int], None], available_bytes: int | None = None
) -> tuple[Link, HierarchicalLinks | None]:
    """The links of all ranks together, and those of nodes where there are two levels. Collective.

    Args:
        rank_group: who trains together.
        advance: called as ``advance("network", done, total)``.
        available_bytes: that it may take on this rank; None: as much as it likes.
    """
    max_bytes = None if available_bytes is None else available_bytes // LARGEST_TENSOR_DIVISOR
    kinds = 2 if rank_group.is_hierarchical else 1

    def link_progress(done: int, total: int) -> None:
        advance("network", done, kinds * total)

    def hierarchical_links_progress(done: int, total: int) -> None:
        advance("network", total + done, 2 * total)

    link = network.measure_links(rank_group.group, rank_group.device, max_bytes=max_bytes, progress=link_progress)
    if not rank_group.is_hierarchical:
        return link, None
    groups = LevelGroups.create(rank_group.group, rank_group.nodes)
    levels = network.measure_hierarchical_links(
        groups, rank_group.device, max_bytes=max_bytes, progress=hierarchical_links_progress
    )
    groups.destroy()
    return link, levels


def _measure_compute_times(
    traced: TracedStep,
    rank_group: RankGroup,
    constraints: SearchConstraints,
    advance: Callable[[int, int], None],
    available_bytes: int,
) -> ComputeTimes:
    """Those of the slowest team. The ranks of a team share the work: they have equal devices, and the sums are those of
    the slowest rank once the whole step is rehearsed. Collective."""
    many = next(
        size for size in range(min(MAX_TIMING_RANKS, rank_group.world_size), 0, -1) if rank_group.world_size % size == 0
    )
    work: dict[str, Any] = {
        "constraints": constraints,
        "available_bytes": available_bytes,
        "time_budget_s": compute.KERNEL_TIMING_BUDGET_S / many,
    }
    place = rank_group.group.rank() % many
    shares: list[Any] = [None] * rank_group.world_size

    def measure_own_partition() -> KernelTimes:
        return compute.measure_partition(traced, rank_group.device, place, many, progress=advance, **work)

    dist.all_gather_object(shares, raise_on_all_ranks(rank_group.group, measure_own_partition), group=rank_group.group)
    here = shares[rank_group.group.rank() - place :][:many]
    times = raise_on_all_ranks(
        rank_group.group, lambda: compute.measure_compute(traced, rank_group.device, partitions=here, **work)
    )
    return _slowest_rank_times(times, rank_group)


def _slowest_rank_times(times: ComputeTimes, rank_group: RankGroup) -> ComputeTimes:
    """Of all ranks' measurements, those of the one that takes longest: the others wait for it."""
    everyone: list[Any] = [None] * rank_group.world_size
    dist.all_gather_object(everyone, times, group=rank_group.group)

    def total_s(one: ComputeTimes) -> float:
        return sum(line.seconds_at(8) for line in [*one.operators, one.unattributed])

    return max(everyone, key=total_s)  # type: ignore[no-any-return]


def _is_cache_valid(cluster_profile: ClusterProfile, rank_group: RankGroup) -> bool:
    """Whether all that is needed was measured, and one all-gather takes about as long as the cached fit says."""
    if rank_group.is_hierarchical and cluster_profile.hierarchical_links is None:
        return False
    if rank_group.world_size == 1:
        return True
    taken = network.time_all_gather_s(rank_group.group, rank_group.device, PROBE_BYTES)
    expected = cluster_profile.link.all_gather.time_s(PROBE_BYTES, rank_group.world_size)
    return expected <= PROBE_TOLERANCE * taken and taken <= PROBE_TOLERANCE * expected


def cache_key(
    traced: TracedStep, device: torch.device, cluster: Cluster, constraints: SearchConstraints, offline: bool = False
) -> str:
    """Fingerprint of hardware, versions and model: measurements are valid for exactly this.

    Args:
        traced: the model.
        device: that is measured.
        cluster: number of ranks and backend count, not its links.
        constraints: say which ways to split operators are measured.
        offline: whether one process measures, while no other rank uses the same machine.
    """
    facts = _cache_key_fields(device, cluster) | {
        "model": traced.model_profile.fingerprint,
        "step": traced.model_profile.model_dump_json(exclude={"evaluation"}),  # nothing is measured of that
        "slices": str(constraints.slice_granularity),
    }
    if offline:
        facts["offline"] = True
    return _hash(facts)


def _cache_key_fields(device: torch.device, cluster: Cluster) -> dict[str, Any]:
    """What all measurements depend on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": platform.node(),
        "device": name,
        "ranks": [cluster.ranks, cluster.nodes, *cluster.devices_by_node],
        "threads": torch.get_num_threads(),
        "backend": cluster.backend,
        "torch": torch.__version__,
        "format": CACHE_VERSION,
    }


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


def read(file: Path, kind: type[FrozenT]) -> FrozenT | None:
    """What ``write_yaml`` left; None if there is nothing, or nothing that can be read."""
    if not file.exists():
        return None
    try:
        return kind.model_validate_json(file.read_text())
    except ValidationError:
        warnings.warn(f"{file} is damaged and will be measured anew", OSDPWarning, stacklevel=2)
        return None


def write(file: Path, text: str) -> None:
    """Written whole or not at all."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(text)
        Path(temporary.name).replace(file)
    except OSError as error:
        warnings.warn(f"measurements can't be kept in {file.parent}: {error}", OSDPWarning, stacklevel=2)


@contextmanager
def show_progress(enabled: bool, names: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each kind of measurement, on the standard error stream, if ``enabled``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bars:
        tasks = {name: bars.add_task(f"measuring the {name}", total=None) for name in names}

        def advance(name: str, done: int, total: int) -> None:
            bars.update(tasks[name], completed=done, total=total)

        yield advance


def store_correction(file: Path, correction: Correction) -> None:
    """Stores what a run has taught with the measurements that its plan was made from."""
    known = read(file, Profile)
    if known is not None:
        write(file, known.model_copy(update={"correction": correction}).model_dump_json())
