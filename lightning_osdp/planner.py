"""Module + batch + hardware -> plan: joins measurements and planning."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_osdp import collectives, measurements
from lightning_osdp.errors import ConfigurationError, InfeasibleError, OSDPWarning, PlanMismatchError, TraceError
from lightning_osdp.measurements import NO_CORRECTION, NO_LINK, Measurements, Ranks
from lightning_osdp.planning.caching_allocator import margin_bytes, staying_tensors
from lightning_osdp.planning.calibration import Correction, corrected_cluster, corrected_compute
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.operators import NOTHING_BETWEEN, BetweenSteps
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, as_rehearsed, of_plan, with_excess
from lightning_osdp.planning.schedule import BatchRule, Problem, make_plan
from lightning_osdp.planning.settled import Settled, asked, kept, latest, settled, settled_before
from lightning_osdp.planning.wishes import NO_WISHES, Wishes
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.memory import Limit, allowance, memory_in_use, memory_limit, overhead
from lightning_osdp.profiling.trace import Trace, trace, trace_real
from lightning_osdp.rehearsal import Stage, rehearse_alone, rehearse_chosen

Result = TypeVar("Result")

START_S = 30.0
"""What a start is to take, from the beginning of the set-up to the first step."""

MODES_LEFT_S, APPLYING_S = 14.0, 2.0
"""Of that, what is kept for finding a plan and rehearsing it, while the step is rehearsed in one more mode; and for
applying a plan."""

MOST_REHEARSED = 2
"""Plans that one start finds and rehearses."""

UNSEEN_GAIN = 0.25
"""Share by which a plan has to promise more than what was rehearsed, to be taken as it is where there is no time to
rehearse it as well. What nobody has run is seldom predicted that much too fast; plans of earlier starts, which may have
had less memory, can be that much slower."""


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
    between: BetweenSteps = NOTHING_BETWEEN,
    cache: Path | None = None,
) -> Trace:
    """Reads the module's training step on fake tensors, or by one real step on a small batch where it can't be; where
    ``between`` steps something is evaluated in batches of its own, what that takes, too, as far as it can be told.
    Steps that ``cache`` knows are only read as far as needed to know them again."""
    evaluation = between.evaluation_batch_size > 0
    known = measurements.StepsKept(cache) if cache is not None else None
    try:
        return trace(
            module, batch, batch_size, device=device, step_context=step_context, evaluation=evaluation, known=known
        )
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
    limit: Limit,
    model_bytes: int,
    *,
    cluster: Cluster | None = None,
    cache: Path | None = None,
    wishes: Wishes = NO_WISHES,
    between: BetweenSteps = NOTHING_BETWEEN,
    stage: Stage | None = None,
    began_s: float,
) -> Outcome:
    """Measures what is not known yet and plans on the first rank; the same plan comes back on every rank.

    Args:
        traced: the model, the same on every rank.
        ranks: who trains together.
        rule: which batch sizes to try.
        limit: bytes per device; the smallest over the ranks counts. Asked for when all is measured: it may count pages
            of libraries, which grow by what measuring runs.
        model_bytes: of parameters and buffers on the device now.
        cluster: hardware that is known already; its links are not measured.
        cache: folder of measurements; None to keep none.
        wishes: what is not left to the search.
        between: what the run does between steps.
        stage: to rehearse the step on; None to leave it at times that are measured in parts.
        began_s: when the start began (``time.monotonic``), which is to take ``START_S``.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: ``cluster`` has another number of ranks, the batch sizes contradict each other, or a wish
            matches nothing.
    """
    if cluster is not None and cluster.ranks != ranks.count:
        raise ConfigurationError(f"cluster describes {cluster.ranks} ranks, this run has {ranks.count}")
    start = time.monotonic()
    team = _Team(traced, ranks, cluster, limit, model_bytes, wishes, between, began_s)
    measured, from_cache, file = measurements.measured(
        traced, ranks, cluster, cache, wishes, team.free_bytes, stage, lambda: team.left_s() < MODES_LEFT_S
    )
    question = asked(rule, wishes, between, measured.correction)
    if from_cache:
        plan, room = team.as_before(measured, rule, question)
    else:
        plan, room = None, team.room(stepped=bool(measured.rehearsals))
    if plan is None:
        plan, measured, room = team.found(measured, rule, room, stage)
        seen = {"used_bytes": room.used, "file_bytes": room.files} if measured.rehearsals else {}
        new = Settled(asked=question, plan=plan.without_reasons(), **seen)
        measured = measured.model_copy(update={"settled": kept(measured.settled, new)})
        if ranks.is_first and file is not None:
            measurements.write(file, measured.model_dump_json())

    def again(correction: Correction, rule: BatchRule) -> ExecutionPlan:
        return team.decide(measured.model_copy(update={"correction": correction}), rule, room, UNSEEN_GAIN)

    return Outcome(plan, time.monotonic() - start, from_cache, measured.correction, file, again)


@dataclass(frozen=True)
class _Room:
    """Bytes of the rank that has least.

    Attributes:
        limit: what a rank may take.
        used: of that, what is not the model's.
        guessed: of ``used``, what is not there yet but kept for the first steps.
        files: of ``limit``, what stands for pages of files (``Limit.file_pages``).
    """

    limit: int
    used: int
    guessed: int
    files: int = 0

    def as_shown(self, used: int) -> _Room:
        """With what an earlier start has seen steps leave behind, if that is within what is guessed now."""
        return replace(self, used=used, guessed=0) if self.used - self.guessed <= used <= self.used else self


@dataclass(frozen=True)
class _Team:
    """Ranks that plan together; what stays the same while they do."""

    traced: Trace
    ranks: Ranks
    cluster: Cluster | None
    limit: Limit
    model_bytes: int
    wishes: Wishes
    between: BetweenSteps
    began_s: float
    """When the start began, on the monotonic clock."""

    def free_bytes(self) -> int:
        """What this rank may take now."""
        return max(0, self.limit.now() - memory_in_use(self.ranks.device))

    def room(self, stepped: bool) -> _Room:
        """What there is now; ``stepped``: after steps on a copy. Collective."""
        device = self.ranks.device
        used = not_for_the_model(self.traced, device, self.model_bytes, stepped)
        limit, files = self.limit.now(), self.limit.file_pages()
        limit, used, files = self.least_and_most([limit], [used, files])
        return _Room(limit, used, min(used, allowance(device, stepped)), files)

    def room_seen(self, earlier: Settled) -> _Room | None:
        """What an earlier start was left with when all was there, if this one is on its way to that: then nothing has
        to be run and no garbage looked for to see how much memory there is. None if it has taken more already.
        Collective."""
        device = self.ranks.device
        held = (
            memory_in_use(device) - self.model_bytes + _margin(self.traced, device) + allowance(device, stepped=False)
        )
        limit, held = self.least_and_most([self.limit.now() - self.limit.file_pages()], [held])
        if held > earlier.used_bytes:
            return None
        return _Room(limit + earlier.file_bytes, earlier.used_bytes, 0, earlier.file_bytes)

    def least_and_most(self, least: Sequence[int], most: Sequence[int]) -> list[int]:
        """The least of any rank of some numbers, then the most of others. Collective."""
        numbers = torch.tensor([*(-each for each in least), *most]).to(self.ranks.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.ranks.group)
        found: list[int] = numbers.tolist()
        return [*(-each for each in found[: len(least)]), *found[len(least) :]]

    def found(
        self, measured: Measurements, rule: BatchRule, room: _Room, stage: Stage | None
    ) -> tuple[ExecutionPlan, Measurements, _Room]:
        """The plan that is found, rehearsed where it can be; the measurements with the rehearsals, and the room that
        these have left. Collective."""
        before_s = self.left_s()
        plan = self.decide(measured, rule, room)
        search_s = before_s - self.left_s()
        for left in reversed(range(MOST_REHEARSED)):
            before_s = self.left_s()
            shown = self.rehearsed(stage, measured, plan, search_s)
            if shown is None:
                break
            measured = measured.model_copy(update={"rehearsals": latest((*measured.rehearsals, shown))})
            room = self.room(stepped=True)
            left_s = self.left_s()
            again = left and left_s - APPLYING_S - 2 * search_s > before_s - left_s  # it would search before and after
            try:
                plan = self.decide(measured, rule, room, STEP_ERROR if again else UNSEEN_GAIN)
            except InfeasibleError:  # for what the rehearsal has left behind: the plan was the last that fits
                return as_rehearsed(plan, measured.rehearsals), measured, room
            if not again:
                break
        return plan, measured, room

    def left_s(self) -> float:
        """Seconds that the start may still take, on the rank that has fewest. Collective."""
        took_s = torch.tensor(time.monotonic() - self.began_s).to(self.ranks.device)
        dist.all_reduce(took_s, op=dist.ReduceOp.MAX, group=self.ranks.group)
        return START_S - float(took_s)

    def decide(self, measured: Measurements, rule: BatchRule, room: _Room, gain: float = STEP_ERROR) -> ExecutionPlan:
        """The first rank's plan, on every rank. Collective."""

        def search(problem: Problem) -> ExecutionPlan:
            return _plan_for(problem, rule, measured.rehearsals, room.guessed, gain)

        plan = self._of_first_rank(search, measured, room)
        assert plan is not None
        return plan

    def as_before(self, measured: Measurements, rule: BatchRule, question: str) -> tuple[ExecutionPlan | None, _Room]:
        """What an earlier start has come to, if that is still right, and the room that there is. Collective."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return settled_before(problem, rule, question, measured.settled, measured.rehearsals)

        earlier = [one for one in measured.settled if one.asked == question]
        room = self.room_seen(earlier[-1]) if earlier else None
        plan = self._of_first_rank(look_up, measured, room) if room is not None else None
        if room is None or plan is None:
            on_all_ranks(self.ranks, lambda: compute.warm_up(self.traced, self.ranks.device))
            room = self.room(stepped=False).as_shown(earlier[-1].used_bytes if earlier else 0)
            plan = self._of_first_rank(look_up, measured, room)
        return plan, room

    def _of_first_rank(
        self, work: Callable[[Problem], ExecutionPlan | None], measured: Measurements, room: _Room
    ) -> ExecutionPlan | None:
        """What ``work`` makes of the problem there, on every rank. Collective."""

        def first_rank() -> str | None:
            if not self.ranks.is_first:
                return None
            engine = with_excess(measured.engine, measured.rehearsals)
            hardware = measurements.hardware(self.ranks, self.cluster, measured.model_copy(update={"engine": engine}))
            problem = _problem(self.traced, hardware, measured, room.limit, room.used, self.wishes, self.between)
            plan = work(problem)
            return None if plan is None else plan.to_json()

        text = [on_all_ranks(self.ranks, first_rank)]
        dist.broadcast_object_list(text, src=dist.get_global_rank(self.ranks.group, 0), group=self.ranks.group)
        return None if text[0] is None else ExecutionPlan.from_json(text[0])

    def rehearsed(
        self, stage: Stage | None, measured: Measurements, plan: ExecutionPlan, search_s: float
    ) -> Rehearsal | None:
        """What ``plan`` takes; None if that is known, or can't be. Collective. One more search comes after it, of
        ``search_s``."""
        if stage is None or of_plan(plan, measured.rehearsals):
            return None
        known = measurements.hardware(self.ranks, self.cluster, measured)

        def left_s() -> float:
            return self.left_s() - search_s - APPLYING_S

        return rehearse_chosen(
            stage, self.traced, self.ranks.group, known, measured.compute, plan, self.free_bytes(), left_s
        )


def _plan_for(
    problem: Problem,
    rule: BatchRule,
    rehearsals: Sequence[Rehearsal],
    guessed_bytes: int,
    gain: float = STEP_ERROR,
) -> ExecutionPlan:
    """The plan for ``problem``. Where nothing fits for want of no more than ``guessed_bytes``, which may not be taken,
    the plan of least memory is tried: without it there would be no training at all."""
    try:
        return settled(problem, rule, rehearsals, gain)
    except InfeasibleError as error:
        if error.needed_bytes > problem.memory_limit_bytes + guessed_bytes:
            raise
        warnings.warn(
            f"{error}. {guessed_bytes >> 20} MiB of what the process takes are kept for its first steps, which may "
            "take less: training is tried, and ends where it does run out of memory",
            OSDPWarning,
            stacklevel=2,
        )
        least = replace(problem, memory_limit_bytes=error.needed_bytes)
        plan = settled(least, rule, rehearsals, gain)
        return plan.model_copy(update={"memory_limit_bytes": problem.memory_limit_bytes})


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
    here, there = measurements.this_cluster(ranks, NO_LINK), earlier.cluster
    try:
        earlier.check(traced.description, ranks.count)
    except PlanMismatchError:
        return None
    same = all(getattr(here, name) == getattr(there, name) for name in ("nodes", "device", "backend"))
    fits = earlier.predicted.most_memory_bytes <= -int(limit)
    allowed = (earlier.batch_size, earlier.accumulate_grad_batches) in set(rule.pairs(ranks.count))
    return earlier if same and fits and allowed else None


def _problem(
    traced: Trace,
    cluster: Cluster,
    measured: Measurements,
    limit_bytes: int,
    overhead_bytes: int,
    wishes: Wishes,
    between: BetweenSteps,
) -> Problem:
    correction = measured.correction
    return Problem(
        measured.compute.with_scratch(traced.description),
        corrected_cluster(cluster, correction),
        corrected_compute(measured.compute, correction),
        limit_bytes,
        max(0, overhead_bytes + correction.memory_bytes),
        wishes,
        between,
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
    between: BetweenSteps = NOTHING_BETWEEN,
    stage: Stage | None = None,
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
        between: what the run does between steps.
        stage: to rehearse the plain step on; None to leave its compute at times that are measured in parts.

    Raises:
        InfeasibleError: nothing fits.
        ConfigurationError: a wish matches nothing, or the batch sizes contradict each other.
    """
    start = time.monotonic()
    files = (
        [cache / f"{measurements.key_of(traced, device, cluster, wishes, alone)}.json" for alone in (False, True)]
        if cache
        else []
    )
    stored = (measurements.read(file, Measurements) for file in files)
    known = next((found for found in stored if found is not None), None)
    if known is None:
        traced = traced.whole()
        with measurements.progress(True, ("compute",)) as advance:
            shown = partial(advance, "compute")
            times = compute.measure(traced, device, progress=shown, wishes=wishes)
        if stage is not None:
            room_bytes = max(0, memory_limit(device, cluster.devices_per_node) - memory_in_use(device))
            times = rehearse_alone(stage, traced, cluster, times, room_bytes)
        known, from_cache = Measurements(link=cluster.link, levels=cluster.levels, compute=times), False
        if files:
            measurements.write(files[-1], known.model_dump_json())
    else:
        compute.warm_up(traced, device)
        from_cache = True
    profiling_s = time.monotonic() - start
    used = not_for_the_model(traced, device, model_bytes)
    problem = _problem(traced, cluster, known, memory_limit_bytes, used, wishes, between)
    return Outcome(make_plan(problem, rule), profiling_s, from_cache, known.correction, problem=problem)


def not_for_the_model(traced: Trace, device: torch.device, model_bytes: int, stepped: bool = False) -> int:
    """The process's own memory, and on CUDA what the caching allocator can't use of the segments that it takes."""
    return overhead(device, model_bytes, stepped) + _margin(traced, device)


def _margin(traced: Trace, device: torch.device) -> int:
    return margin_bytes(staying_tensors(traced.description)) if device.type == "cuda" else 0
