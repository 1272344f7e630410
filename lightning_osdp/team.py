"""Ranks that plan together: how much memory they have, the first one's plan on all of them, and that a start ends in
time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_osdp import measurements
from lightning_osdp.collectives import largest_of_ranks, of_first_rank, on_all_ranks
from lightning_osdp.copies import Stage
from lightning_osdp.errors import InfeasibleError, OSDPWarning
from lightning_osdp.measurements import Measurements, Ranks
from lightning_osdp.planning.caching_allocator import margin_bytes, staying_tensors
from lightning_osdp.planning.calibration import corrected_cluster, corrected_compute
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.heap import kept_batch_size
from lightning_osdp.planning.operators import BetweenSteps
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.planning.rehearsed import STEP_ERROR, Rehearsal, as_rehearsed, of_plan, with_excess
from lightning_osdp.planning.schedule import BatchRule, Problem, never
from lightning_osdp.planning.settled import Settled, latest, settled, settled_before
from lightning_osdp.planning.wishes import Wishes
from lightning_osdp.profiling import compute
from lightning_osdp.profiling.heap import HEAP
from lightning_osdp.profiling.memory import Limit, allowance, memory_in_use, overhead
from lightning_osdp.profiling.trace import Trace
from lightning_osdp.rehearsal import rehearse_chosen

START_S = 30.0
"""What a start is to take, from the beginning of the set-up to the first step."""

APPLYING_S = 3.0
"""Of that, what is kept for applying a plan. [measured: 60 M parameters, 4 ranks on 2 cores: 2.3 s from the end of a
search]"""

MOST_REHEARSED = 2
"""Plans that one start finds and rehearses."""

FIRST_SEARCH = 0.4
"""Share of what is left that a search may take which is to be followed by a rehearsal and another search."""

KEPT_LARGER = 2
"""Times the largest batch size that was traced, up to which freed tensors may stay in the heap. [measured, natural
language model, traced at 2 and 8 samples: a step of 2 takes 0.72 of the time, of 8 0.76, of 46 all of it]"""

UNSEEN_GAIN = 0.25
"""Share by which a plan has to promise more than what was rehearsed, to be taken as it is where there is no time to
rehearse it as well. What nobody has run is seldom predicted that much too fast; plans of earlier starts, which may have
had less memory, can be that much slower."""


@dataclass(frozen=True)
class Room:
    """Bytes of the rank that has least.

    Attributes:
        limit: what a rank may take.
        used: of that, what is not the model's.
        guessed: of ``used``, what is not there yet but kept for the first steps and for evaluation.
        files: of ``limit``, what stands for pages of files (``Limit.file_pages``).
    """

    limit: int
    used: int
    guessed: int
    files: int = 0

    def as_shown(self, earlier: Settled) -> Room:
        """With what an earlier start has seen steps leave behind, if it has and that is within what is guessed now."""
        seen = not earlier.guessed_bytes and self.used - self.guessed <= earlier.used_bytes <= self.used
        return replace(self, used=earlier.used_bytes, guessed=0) if seen else self


@dataclass(frozen=True)
class Team:
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

    def room(self, stepped: bool) -> Room:
        """What there is now; ``stepped``: after steps of a plan that was found. Collective."""
        device = self.ranks.device
        used = not_for_the_model(self.traced, device, self.model_bytes, self.between, stepped)
        coming = self.limit.pages_to_come(stepped)
        limit, files = self.limit.now() + coming, self.limit.file_pages() + coming
        limit, used, files = self.least_and_most([limit], [used, files])
        return Room(limit, used, min(used, self._kept(stepped)), files)

    def room_seen(self, earlier: Settled) -> Room | None:
        """What an earlier start was left with when all was there, and kept for its first steps, if this one is on its
        way to that: then nothing has to be run and no garbage looked for to see how much memory there is. None if it
        has taken more already. Collective."""
        device = self.ranks.device
        held = memory_in_use(device) - self.model_bytes + _margin(self.traced, device) + self._kept(stepped=False)
        limit, held = self.least_and_most([self.limit.now() - self.limit.file_pages()], [held])
        if held > earlier.used_bytes:
            return None
        return Room(limit + earlier.file_bytes, earlier.used_bytes, earlier.guessed_bytes, earlier.file_bytes)

    def _kept(self, stepped: bool) -> int:
        """For what is not there yet."""
        return allowance(self.ranks.device, stepped, self.between.evaluates)

    def least_and_most(self, least: Sequence[int], most: Sequence[int]) -> list[int]:
        """The least of any rank of some numbers, then the most of others. Collective."""
        numbers = [*(-each for each in least), *most]
        found = [int(each) for each in largest_of_ranks(numbers, self.ranks.group, self.ranks.device)]
        return [*(-each for each in found[: len(least)]), *found[len(least) :]]

    def found(
        self, measured: Measurements, rule: BatchRule, room: Room, stage: Stage | None
    ) -> tuple[ExecutionPlan, Measurements, Room]:
        """The plan that is found, rehearsed where it can be; the measurements with the rehearsals, and the room that
        these have left. Collective."""
        before_s = self.left_s()
        plan = self.decide(measured, rule, room, share=FIRST_SEARCH)
        search_s = before_s - self.left_s()
        cut_short = search_s >= FIRST_SEARCH * (before_s - APPLYING_S)
        for left in reversed(range(MOST_REHEARSED)):
            before_s = self.left_s()
            shown = self.rehearsed(stage, measured, plan, search_s)
            if shown is None:
                # for a rehearsal that there is not; what is found anew in no more time than before is no better
                if cut_short and self.left_s() - APPLYING_S > search_s:
                    plan = self.decide(measured, rule, room, UNSEEN_GAIN, share=1.0)
                break
            measured = measured.model_copy(update={"rehearsals": latest((*measured.rehearsals, shown))})
            room = self.room(stepped=True)
            left_s = self.left_s()
            if left_s - APPLYING_S < search_s:  # what was rehearsed is known; to look for more would take too long
                known = self.known(measured, rule, plan, room)
                if known is not None:
                    return known, measured, room
            again = left and left_s - APPLYING_S - 2 * search_s > before_s - left_s  # it would search before and after
            try:
                gain, share = (STEP_ERROR, FIRST_SEARCH) if again else (UNSEEN_GAIN, 1.0)
                plan = self.decide(measured, rule, room, gain, share)
            except InfeasibleError:  # for what the rehearsal has left behind: the plan was the last that fits
                return as_rehearsed(plan, measured.rehearsals), measured, room
            if not again:
                break
        return plan, measured, room

    def known(self, measured: Measurements, rule: BatchRule, plan: ExecutionPlan, room: Room) -> ExecutionPlan | None:
        """``plan`` as it is predicted now, without a search; None if there is no room for it any more. Collective."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return settled_before(problem, rule, "", [Settled(asked="", plan=plan)], measured.rehearsals)

        return self._of_first_rank(look_up, measured, room)

    def left_s(self) -> float:
        """Seconds that the start may still take, on the rank that has fewest. Collective."""
        (took_s,) = largest_of_ranks([time.monotonic() - self.began_s], self.ranks.group, self.ranks.device)
        return START_S - took_s

    def decide(
        self, measured: Measurements, rule: BatchRule, room: Room, gain: float = STEP_ERROR, share: float | None = None
    ) -> ExecutionPlan:
        """The first rank's plan, on every rank; if a ``share`` of what is left of the start is given, the search takes
        little more. Collective."""
        now_s = time.monotonic()
        left_s = self.began_s + START_S - APPLYING_S - now_s

        def late() -> bool:
            return share is not None and time.monotonic() - now_s > share * left_s

        def search(problem: Problem) -> ExecutionPlan:
            with HEAP.kept():
                return plan_for(problem, rule, measured.rehearsals, room.guessed, gain, late)

        plan = self._of_first_rank(search, measured, room)
        assert plan is not None
        return plan

    def as_before(self, measured: Measurements, rule: BatchRule, question: str) -> tuple[ExecutionPlan | None, Room]:
        """What an earlier start has come to, if that is still right, and the room that there is. Collective."""

        def look_up(problem: Problem) -> ExecutionPlan | None:
            return settled_before(problem, rule, question, measured.settled, measured.rehearsals)

        earlier = [one for one in measured.settled if one.asked == question]
        room = self.room_seen(earlier[-1]) if earlier else None
        plan = self._of_first_rank(look_up, measured, room) if room is not None else None
        if room is None or plan is None:
            on_all_ranks(self.ranks.group, lambda: compute.warm_up(self.traced, self.ranks.device))
            room = self.room(stepped=False)
            room = room.as_shown(earlier[-1]) if earlier else room
            plan = self._of_first_rank(look_up, measured, room)
        return plan, room

    def _of_first_rank(
        self, work: Callable[[Problem], ExecutionPlan | None], measured: Measurements, room: Room
    ) -> ExecutionPlan | None:
        """What ``work`` makes of the problem there, on every rank. Collective."""

        def first_rank() -> str | None:
            if not self.ranks.is_first:
                return None
            engine = with_excess(measured.engine, measured.rehearsals)
            hardware = measurements.hardware(self.ranks, self.cluster, measured.model_copy(update={"engine": engine}))
            problem = problem_of(self.traced, hardware, measured, room.limit, room.used, self.wishes, self.between)
            plan = work(problem)
            return None if plan is None else plan.to_json()

        text = of_first_rank(self.ranks.group, on_all_ranks(self.ranks.group, first_rank))
        return None if text is None else ExecutionPlan.from_json(text)

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

        compute = (measured.kept_compute if plan.keep_heap else None) or measured.compute
        return rehearse_chosen(stage, self.traced, self.ranks.group, known, compute, plan, self.free_bytes(), left_s)


def plan_for(
    problem: Problem,
    rule: BatchRule,
    rehearsals: Sequence[Rehearsal],
    guessed_bytes: int,
    gain: float = STEP_ERROR,
    late: Callable[[], bool] = never,
) -> ExecutionPlan:
    """The plan for ``problem``. Where nothing fits for want of no more than ``guessed_bytes``, which may not be taken,
    the plan of least memory is tried: without it there would be no training at all."""
    try:
        return settled(problem, rule, rehearsals, gain, late)
    except InfeasibleError as error:
        if error.needed_bytes > problem.memory_limit_bytes + guessed_bytes:
            raise
        warnings.warn(
            f"{error}. {guessed_bytes >> 20} MiB are kept for what the process has yet to take, which may be less: "
            "training is tried, and ends where it does run out of memory",
            OSDPWarning,
            stacklevel=2,
        )
        least = replace(problem, memory_limit_bytes=error.needed_bytes)
        plan = settled(least, rule, rehearsals, gain, late)
        return plan.model_copy(update={"memory_limit_bytes": problem.memory_limit_bytes})


def problem_of(
    traced: Trace,
    cluster: Cluster,
    measured: Measurements,
    limit_bytes: int,
    overhead_bytes: int,
    wishes: Wishes,
    between: BetweenSteps,
) -> Problem:
    """What is to be solved, with all that was measured and all that runs have taught."""
    correction = measured.correction
    kept_size = int(min(KEPT_LARGER * max(traced.sizes, default=1), kept_batch_size(traced.description)))
    kept = measured.kept_compute if kept_size else None
    return Problem(
        measured.compute.with_scratch(traced.description),
        corrected_cluster(cluster, correction),
        corrected_compute(measured.compute, correction),
        limit_bytes,
        max(0, overhead_bytes + correction.memory_bytes),
        wishes,
        between,
        None if kept is None else corrected_compute(kept, correction),
        kept_size,
    )


def not_for_the_model(
    traced: Trace, device: torch.device, model_bytes: int, between: BetweenSteps, stepped: bool = False
) -> int:
    """The process's own memory, and on CUDA what the caching allocator can't use of the segments that it takes."""
    return overhead(device, model_bytes, stepped, between.evaluates) + _margin(traced, device)


def _margin(traced: Trace, device: torch.device) -> int:
    return margin_bytes(staying_tensors(traced.description)) if device.type == "cuda" else 0
