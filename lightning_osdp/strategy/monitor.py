"""Follows real training steps: prints predicted beside measured, and hands on what the next plan can learn."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from lightning_osdp.autotune.measure import RankGroup
from lightning_osdp.backend import agree
from lightning_osdp.backend.work import COMM_WAIT
from lightning_osdp.planning.cost.run_correction import Correction, MeasuredStep, exceeds_prediction, update_correction
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables
from lightning_osdp.strategy.step_timer import StepTimer

DRIFT_STEPS = (5, 20)
"""After so many optimizer steps, and then after every ``DRIFT_EVERY``, the peak is held against its prediction."""

DRIFT_EVERY = 200

DRIFT_MARGIN = 0.05
"""Share of the predicted peak that the measured one may be above it."""

FIRST_REPORT_STEPS = 20
"""Optimizer steps after which predicted and measured are compared for the first time."""


class PredictionMonitor:
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
        rank_group: RankGroup,
        correction: Correction,
        save_correction: Callable[[Correction], None] | None,
        detect_drift: bool = False,
    ) -> None:
        self._plan = plan
        self._rank_group = rank_group
        self._correction = correction
        self._save_correction = save_correction
        self._timer = StepTimer(rank_group.device, lambda: COMM_WAIT.seconds)
        self._num_steps = 0
        self._reported_steps = 0
        self._detect_drift = detect_drift
        self.drift: MeasuredStep | None = None
        """What was measured when memory was found to leave its prediction, on any rank; the same on all."""

    @property
    def measured_step(self) -> MeasuredStep | None:
        """What a step took on this rank so far; None until enough were made."""
        return self._timer.summarize()

    def on_microbatch_start(self) -> None:
        """A micro-batch starts."""
        self._timer.on_microbatch_start()

    def on_step_end(self) -> None:
        """The optimizer's update is done."""
        self._timer.on_step_end()
        self._num_steps += 1
        if self._num_steps == FIRST_REPORT_STEPS:
            self.report()
        if self._detect_drift and (self._num_steps in DRIFT_STEPS or self._num_steps % DRIFT_EVERY == 0):
            slowest = self._slowest_rank_step()
            if slowest is not None and exceeds_prediction(self._plan, slowest.peak_memory_bytes, DRIFT_MARGIN):
                self.drift = slowest

    def report(self) -> None:
        """Prints predicted beside measured on the rank that took most, if there was a step since the last time."""
        measured = self._slowest_rank_step()
        if measured is None or self._num_steps == self._reported_steps:
            return
        self._reported_steps = self._num_steps
        if self._rank_group.is_rank_zero:
            Console().print(tables.measured_table(self._plan, measured, self._num_steps))
            if self._save_correction is not None:
                self._save_correction(update_correction(self._correction, self._plan, measured))

    def _slowest_rank_step(self) -> MeasuredStep | None:
        """The largest figures of all ranks."""
        ours = self._timer.summarize()
        if ours is None:  # on every rank alike: all have made as many steps
            return None
        waited = -1.0 if ours.communication_s is None else ours.communication_s
        numbers = (ours.step_time_s, waited, ours.peak_memory_bytes)
        largest = agree.all_reduce_max(numbers, self._rank_group.group, self._rank_group.device)
        step_time_s, communication_s, peak = largest
        return MeasuredStep(step_time_s, None if communication_s < 0 else communication_s, int(peak))
