"""Compare real training steps with their prediction, and pass on corrections for the next plan."""

from __future__ import annotations

from collections.abc import Callable

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.backend import agree
from lightning_osdp.backend.work import COMM_WAIT
from lightning_osdp.planning.cost.run_correction import (
    Correction,
    MeasuredStep,
    contradicts_measurements,
    exceeds_prediction,
    is_step_time_off,
    update_correction,
)
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import tables
from lightning_osdp.strategy.step_timer import StepTimer

DRIFT_STEPS = (5, 20)
"""The peak is compared with its prediction after these optimizer steps, and then every ``DRIFT_EVERY`` steps."""

DRIFT_EVERY = 200

DRIFT_MARGIN = 0.05
"""Fraction by which the measured peak may exceed the predicted one."""

FIRST_REPORT_STEPS = 20
"""Optimizer steps after which predictions and measurements are first compared."""


class PredictionMonitor:
    """The comparison of one run under one plan with its prediction.

    Args:
        plan: the plan in use.
        rank_group: the ranks that train together; all of them call every method alike.
        correction: the correction that the plan was predicted with.
        save_correction: called on rank 0 with the new correction, None if measurements are wrong, and whether plans
            have to be tried anew; None to save nothing.
        detect_drift: whether to look for drift of the peak memory, which takes a small collective now and then.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        rank_group: RankGroup,
        correction: Correction,
        save_correction: Callable[[Correction | None, bool], None] | None,
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
        """Measurements when the peak memory of any rank exceeded its prediction; the same on all ranks."""

    @property
    def measured_step(self) -> MeasuredStep | None:
        """Measurements of this rank so far; None until enough steps were made."""
        return self._timer.summarize()

    @property
    def peak_memory_bytes(self) -> int:
        """The largest peak of memory of any step on this rank so far."""
        return self._timer.peak_memory_bytes

    def on_microbatch_start(self) -> None:
        """Note that a micro-batch starts."""
        self._timer.on_microbatch_start()

    def on_step_end(self) -> None:
        """Count a finished optimizer step, and report or check the peak if it is time to."""
        self._timer.on_step_end()
        self._num_steps += 1
        if self._num_steps == FIRST_REPORT_STEPS:
            self.report()
        if self._detect_drift and (self._num_steps in DRIFT_STEPS or self._num_steps % DRIFT_EVERY == 0):
            slowest = self._slowest_rank_step()
            if slowest is not None and exceeds_prediction(self._plan, slowest.peak_memory_bytes, DRIFT_MARGIN):
                self.drift = slowest

    def report(self) -> None:
        """Print predicted and measured figures of the slowest rank, if there was a step since the last report."""
        measured = self._slowest_rank_step()
        if measured is None or self._num_steps == self._reported_steps:
            return
        self._reported_steps = self._num_steps
        if self._rank_group.is_rank_zero:
            tables.print_output(tables.measured_table(self._plan, measured, self._num_steps))
            if self._save_correction is not None:
                is_wrong = contradicts_measurements(self._plan, measured)
                correction = None if is_wrong else update_correction(self._correction, self._plan, measured)
                self._save_correction(correction, is_step_time_off(self._plan, measured))

    def _slowest_rank_step(self) -> MeasuredStep | None:
        """Return the largest figures of all ranks. Collective."""
        own = self._timer.summarize()
        if own is None:  # on all ranks alike, since all have made as many steps
            return None
        exposed_s = -1.0 if own.communication_s is None else own.communication_s
        numbers = (own.step_time_s, exposed_s, own.peak_memory_bytes)
        largest = agree.all_reduce_max(numbers, self._rank_group.group, self._rank_group.device)
        step_time_s, communication_s, peak = largest
        return MeasuredStep(step_time_s, None if communication_s < 0 else communication_s, int(peak))
