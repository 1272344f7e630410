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

from lightning_osdp import collectives
from lightning_osdp.collectives import of_first_rank, on_all_ranks
from lightning_osdp.copies import Stage
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.levels import Levels as LevelGroups
from lightning_osdp.levels import node_layout
from lightning_osdp.planning.calibration import Correction
from lightning_osdp.planning.cluster import (
    NO_OVERHEAD,
    Cluster,
    CollectiveFit,
    ComputeTimes,
    EngineOverhead,
    Levels,
    Link,
)
from lightning_osdp.planning.operators import Frozen, ModelDescription
from lightning_osdp.planning.rehearsed import Rehearsal
from lightning_osdp.planning.settled import Settled
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.profiling import compute, network
from lightning_osdp.profiling.memory import control_group
from lightning_osdp.profiling.timing import Timed
from lightning_osdp.profiling.trace import Trace
from lightning_osdp.rehearsal import rehearse
from lightning_osdp.repeats import CORES
from lightning_osdp.sharding import overhead as engine_overhead

ROOM_FOR_LARGEST = 3
"""Of the memory that is free, the largest tensor that links are measured with takes one part in so many: there are two
of it."""

TEAM = 8
"""Most ranks that share the timing of kernels, neighbours by their numbers."""

PROBE_BYTES = 4 << 20
PROBE_TOLERANCE = 3.0
"""Cached measurements of the network are used only if a fresh all-gather agrees with them within this factor: the same
host may reach its peers over another link today. Busy machines are off by a factor of 2 at times."""

FORMAT = 13
"""Of what is kept. To be raised when what is measured changes its meaning: older files are left alone then."""

NO_LINK = Link(**{name: CollectiveFit(latency_s=0.0, s_per_byte=0.0) for name in Link.model_fields})
"""Of a single rank, or of ranks that are not measured yet."""

NO_CORRECTION = Correction()
"""Of measurements that no run has followed yet."""


class Connections(Frozen):
    """What is measured of the ranks, whatever they train."""

    link: Link
    levels: Levels | None = None
    """Where there are several nodes of several ranks."""
    engine: EngineOverhead = NO_OVERHEAD


class Measurements(Connections):
    """All that a plan is made from."""

    compute: ComputeTimes
    rehearsals: tuple[Rehearsal, ...] = ()
    """Of whole steps, with these measurements."""
    kept_compute: ComputeTimes | None = None
    """``compute`` where freed tensors stay in the heap; None where they can't or must not, or where it was not looked
    for."""
    settled: tuple[Settled, ...] = ()
    """What starts with these measurements have come to."""
    correction: Correction = NO_CORRECTION
    """What runs with these measurements have taught since."""


Kept = TypeVar("Kept", bound=Connections)
Read = TypeVar("Read", bound=Frozen)


@dataclass(frozen=True)
class StepsKept:
    """What was read of training steps, kept in a folder (``trace.KnownSteps``)."""

    folder: Path

    def any(self, looks: str) -> bool:
        """Whether there are some of modules that look so (``trace.looks_of``)."""
        return next(self.folder.glob(f"step-{looks}-*.json"), None) is not None

    def find(self, name: str) -> ModelDescription | None:
        """None if there is none."""
        return read(self._file(name), ModelDescription)

    def keep(self, name: str, description: ModelDescription) -> None:
        """Every rank writes the same: they may be on machines that share no folder."""
        write(self._file(name), description.model_dump_json())

    def _file(self, name: str) -> Path:
        return self.folder / f"step-{name}.json"


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


def sharers(ranks: Ranks) -> int:
    """How many ranks are in this one's control group, and so share its limit. Collective."""
    return _alike((platform.node(), control_group() if ranks.device.type == "cpu" else ""), ranks)


def _alike(here: object, ranks: Ranks) -> int:
    """How many ranks have what there is ``here``. Collective."""
    everyone: list[Any] = [None] * ranks.count
    dist.all_gather_object(everyone, here, group=ranks.group)
    return everyone.count(here)


def this_cluster(
    ranks: Ranks, link: Link, levels: Levels | None = None, engine: EngineOverhead = NO_OVERHEAD
) -> Cluster:
    """The hardware that this run is on, with its links and the engine's overhead as measured."""
    backend, kind = collectives.backend_of(ranks.group, ranks.device), ranks.device.type
    return Cluster(
        nodes=ranks.nodes,
        devices_per_node=ranks.count // ranks.nodes,
        uneven=ranks.uneven,
        device=device_name(ranks.device),
        backend=backend,
        link=link,
        levels=levels,
        reduce_copy=collectives.reduce_copy(backend, ranks.count, kind),
        reduce_buffer_bytes=collectives.reduce_buffer_bytes(backend, ranks.count, kind),
        all_reduce_buffer_bytes=collectives.all_reduce_buffer_bytes(backend, ranks.count, kind),
        engine=engine,
    )


def hardware(ranks: Ranks, cluster: Cluster | None, known: Connections) -> Cluster:
    """The cluster that was given, or this run's, with its engine as it is known."""
    found = cluster or this_cluster(ranks, known.link, known.levels)
    return found.model_copy(update={"engine": known.engine})


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


def measured(
    traced: Trace,
    ranks: Ranks,
    cluster: Cluster | None,
    cache: Path | None,
    wishes: Wishes,
    free_bytes: Callable[[], int],
    stage: Stage | None,
    left_s: Callable[[], float],
) -> tuple[Measurements, bool, Path | None]:
    """Measurements, whether the cache had them, and the file that keeps them (on the first rank). Collective.

    Args:
        traced: the model.
        ranks: who trains together.
        cluster: hardware that is known already.
        cache: folder of measurements.
        wishes: what is not left to the search.
        free_bytes: that this rank may take now.
        stage: to rehearse the step on; None to leave it at the parts.
        left_s: seconds that the start may still take. Collective.
    """
    if ranks.device.type == "cpu":
        CORES.used_by(_alike(CORES.name(), ranks))
    here = this_cluster(ranks, NO_LINK)
    file = cache / f"{key_of(traced, ranks.device, here, wishes)}.json" if cache is not None else None
    stored = _stored(file, Measurements, ranks)
    engine_overhead.warm_up(ranks.group, ranks.device)
    if stored is not None and (cluster is not None or _still_true(stored, ranks)):
        return stored, True, file
    traced, room_bytes = on_all_ranks(ranks.group, traced.whole), free_bytes()
    with progress(ranks.is_first, ("network", "compute")) as advance:
        connections = _connections(ranks, cluster, cache, advance, room_bytes)
        parts = times = _compute_times(traced, ranks, wishes, partial(advance, "compute"), room_bytes)
    measured = Measurements(**dict(connections), compute=parts)
    if stage is not None:
        known = hardware(ranks, cluster, measured)
        times, kept, rehearsals = rehearse(stage, traced, ranks.group, known, parts, free_bytes, left_s)
        measured = measured.model_copy(update={"compute": times, "rehearsals": rehearsals, "kept_compute": kept})
    if times is parts:  # no step was made, and each rank has run but its share of the kernels
        on_all_ranks(ranks.group, lambda: compute.warm_up(traced, ranks.device))
    if ranks.is_first and file is not None:
        write(file, measured.model_dump_json())
    return measured, False, file


def _stored(file: Path | None, kind: type[Kept], ranks: Ranks) -> Kept | None:
    """What the first rank's disk holds, on every rank."""
    return of_first_rank(ranks.group, read(file, kind) if ranks.is_first and file is not None else None)


def _connections(
    ranks: Ranks, cluster: Cluster | None, cache: Path | None, advance: Callable[[str, int, int], None], room_bytes: int
) -> Connections:
    """As given, as they were measured for another model, or measured now. Collective."""
    if cluster is not None:
        return Connections(link=cluster.link, levels=cluster.levels, engine=cluster.engine)
    here = this_cluster(ranks, NO_LINK)
    file = cache / f"ranks-{_hash(_facts(ranks.device, here))}.json" if cache is not None else None
    stored = _stored(file, Connections, ranks)
    if stored is not None and _still_true(stored, ranks):
        return stored
    link, levels = measure_links(ranks, advance, room_bytes)
    engine = engine_overhead.measure(ranks.group, ranks.device, this_cluster(ranks, link, levels), room_bytes)
    connections = Connections(link=link, levels=levels, engine=engine)
    if ranks.is_first and file is not None:
        write(file, connections.model_dump_json())
    return connections


def measure_links(
    ranks: Ranks, advance: Callable[[str, int, int], None], room_bytes: int | None = None
) -> tuple[Link, Levels | None]:
    """The links of all ranks together, and those of nodes where there are two levels. Collective.

    Args:
        ranks: who trains together.
        advance: called as ``advance("network", done, total)``.
        room_bytes: that it may take on this rank; None: as much as it likes.
    """
    max_bytes = None if room_bytes is None else room_bytes // ROOM_FOR_LARGEST
    kinds = 2 if ranks.two_levels else 1

    def link_progress(done: int, total: int) -> None:
        advance("network", done, kinds * total)

    def levels_progress(done: int, total: int) -> None:
        advance("network", total + done, 2 * total)

    link = network.measure(ranks.group, ranks.device, max_bytes=max_bytes, progress=link_progress)
    if not ranks.two_levels:
        return link, None
    groups = LevelGroups.of(ranks.group, ranks.nodes)
    levels = network.measure_levels(groups, ranks.device, max_bytes=max_bytes, progress=levels_progress)
    groups.destroy()
    return link, levels


def _compute_times(
    traced: Trace, ranks: Ranks, wishes: Wishes, advance: Callable[[int, int], None], room_bytes: int
) -> ComputeTimes:
    """Those of the slowest team. The ranks of a team share the work: they have equal devices, and the sums are those of
    the slowest rank once the whole step is rehearsed. Collective."""
    many = next(size for size in range(min(TEAM, ranks.count), 0, -1) if ranks.count % size == 0)
    work: dict[str, Any] = {"wishes": wishes, "room_bytes": room_bytes, "time_budget_s": compute.BUDGET_S / many}
    place = ranks.group.rank() % many
    shares: list[Any] = [None] * ranks.count

    def own_share() -> Timed:
        return compute.measure_share(traced, ranks.device, place, many, progress=advance, **work)

    dist.all_gather_object(shares, on_all_ranks(ranks.group, own_share), group=ranks.group)
    here = shares[ranks.group.rank() - place :][:many]
    times = on_all_ranks(ranks.group, lambda: compute.measure(traced, ranks.device, shares=here, **work))
    return _slowest(times, ranks)


def _slowest(times: ComputeTimes, ranks: Ranks) -> ComputeTimes:
    """Of all ranks' measurements, those of the one that takes longest: the others wait for it."""
    everyone: list[Any] = [None] * ranks.count
    dist.all_gather_object(everyone, times, group=ranks.group)

    def total(one: ComputeTimes) -> float:
        return sum(line.at(8) for line in [*one.operators, one.outside])

    return max(everyone, key=total)  # type: ignore[no-any-return]


def _still_true(known: Connections, ranks: Ranks) -> bool:
    """Whether all that is needed was measured, and one all-gather takes about as long as the cached fit says."""
    if ranks.two_levels and known.levels is None:
        return False
    if ranks.count == 1:
        return True
    taken = network.all_gather_s(ranks.group, ranks.device, PROBE_BYTES)
    expected = known.link.all_gather.time_s(PROBE_BYTES, ranks.count)
    return expected <= PROBE_TOLERANCE * taken and taken <= PROBE_TOLERANCE * expected


def key_of(traced: Trace, device: torch.device, cluster: Cluster, wishes: Wishes, alone: bool = False) -> str:
    """Fingerprint of hardware, versions and model: measurements are valid for exactly this.

    Args:
        traced: the model.
        device: that is measured.
        cluster: number of ranks and backend count, not its links.
        wishes: say which ways to split operators are measured.
        alone: whether one process measures, while no other rank uses the same machine.
    """
    facts = _facts(device, cluster) | {
        "model": traced.description.fingerprint,
        "step": traced.description.model_dump_json(exclude={"evaluation"}),  # nothing is measured of that
        "slices": str(wishes.slice_granularity),
    }
    if alone:
        facts["alone"] = True
    return _hash(facts)


def _facts(device: torch.device, cluster: Cluster) -> dict[str, Any]:
    """What all measurements depend on."""
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "host": platform.node(),
        "device": name,
        "ranks": [cluster.ranks, cluster.nodes, *cluster.uneven],
        "threads": torch.get_num_threads(),
        "backend": cluster.backend,
        "torch": torch.__version__,
        "format": FORMAT,
    }


def _hash(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def read(file: Path, kind: type[Read]) -> Read | None:
    """What ``write`` left; None if there is nothing, or nothing that can be read."""
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
def progress(shown: bool, names: Sequence[str]) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each kind of measurement, on the standard error stream, if ``shown``."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bars:
        tasks = {name: bars.add_task(f"measuring the {name}", total=None) for name in names}

        def advance(name: str, done: int, total: int) -> None:
            bars.update(tasks[name], completed=done, total=total)

        yield advance


def remember(file: Path, correction: Correction) -> None:
    """Stores what a run has taught with the measurements that its plan was made from."""
    known = read(file, Measurements)
    if known is not None:
        write(file, known.model_copy(update={"correction": correction}).model_dump_json())
