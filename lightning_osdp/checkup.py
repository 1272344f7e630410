"""Follows real training steps: prints predicted beside measured, and hands on what the next plan can learn."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from lightning_osdp import collectives, report
from lightning_osdp.measurements import Ranks
from lightning_osdp.planning.calibration import Correction, MeasuredStep, drifted, learn
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.profiling.steps import StepClock

DRIFT_STEPS = (5, 20)
"""After so many optimizer steps, and then after every ``DRIFT_EVERY``, the peak is held against its prediction."""

DRIFT_EVERY = 200

DRIFT_MARGIN = 0.05
"""Share of the predicted peak that the measured one may be above it."""

FIRST_REPORT_STEPS = 20
"""Optimizer steps after which predicted and measured are compared for the first time."""


class Checkup:
    """Of one run under one plan.

    Args:
        plan: that is in use.
        ranks: who trains together. All of them call every method alike.
        correction: that the plan was predicted with.
        keep: is given the new correction, on the first rank; None to keep nothing.
        look_for_drift: whether ``drift`` is looked for, which takes a small collective now and then.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        ranks: Ranks,
        correction: Correction,
        keep: Callable[[Correction], None] | None,
        look_for_drift: bool = False,
    ) -> None:
        self._plan = plan
        self._ranks = ranks
        self._correction = correction
        self._keep = keep
        self._clock = StepClock(ranks.device, lambda: collectives.WAITED.seconds)
        self._steps = 0
        self._reported = 0
        self._look_for_drift = look_for_drift
        self.drift: MeasuredStep | None = None
        """What was measured when memory was found to leave its prediction, on any rank; the same on all."""

    @property
    def measured(self) -> MeasuredStep | None:
        """What a step took on this rank so far; None until enough were made."""
        return self._clock.measured()

    def begin(self) -> None:
        """A micro-batch starts."""
        self._clock.begin()

    def end(self) -> None:
        """The optimizer's update is done."""
        self._clock.end()
        self._steps += 1
        if self._steps == FIRST_REPORT_STEPS:
            self.tell()
        if self._look_for_drift and (self._steps in DRIFT_STEPS or self._steps % DRIFT_EVERY == 0):
            slowest = self._slowest()
            if slowest is not None and drifted(self._plan, slowest.peak_memory_bytes, DRIFT_MARGIN):
                self.drift = slowest

    def tell(self) -> None:
        """Prints predicted beside measured on the rank that took most, if there was a step since the last time."""
        measured = self._slowest()
        if measured is None or self._steps == self._reported:
            return
        self._reported = self._steps
        if self._ranks.is_first:
            Console().print(report.measured_table(self._plan, measured, self._steps))
            if self._keep is not None:
                self._keep(learn(self._correction, self._plan, measured))

    def _slowest(self) -> MeasuredStep | None:
        """The largest figures of all ranks."""
        ours = self._clock.measured()
        if ours is None:  # on every rank alike: all have made as many steps
            return None
        waited = -1.0 if ours.communication_s is None else ours.communication_s
        numbers = (ours.step_time_s, waited, ours.peak_memory_bytes)
        largest = collectives.largest_of_ranks(numbers, self._ranks.group, self._ranks.device)
        step_time_s, communication_s, peak = largest
        return MeasuredStep(step_time_s, None if communication_s < 0 else communication_s, int(peak))
