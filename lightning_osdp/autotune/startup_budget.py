"""The time that a start may take, and what of it each part of the start gets.

A start lasts from the beginning of ``setup`` to the first training step. What it does first is always done: tracing,
measuring and one search. Trials and further searches are done while the budget allows them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_osdp.autotune.progress import StageDisplay
from lightning_osdp.autotune.ranks import RankGroup

STARTUP_BUDGET_S = 30.0
"""Time of a start, from the beginning of ``setup`` to the first step."""

EMULATED_STARTUP_BUDGET_S = 60.0
"""The same where one process stands for a cluster: nobody else waits, and plans that are tried are predicted better."""

APPLY_RESERVE_S = 3.0
"""Reservation for applying the plan. [M-autotune-1]"""

FIRST_SEARCH_FRACTION = 0.4
"""Fraction of the remaining time that a search may take if a trial and another search are to follow it."""

# Reservations: the time that must remain after a calibration trial, for searching, trying and applying a plan.

HEAP_TRIAL_RESERVE_S = 4.5
"""Reservation of the heap trial. Where there is memory for it, the heap policy matters more than a trial of the plan.
[M-autotune-2]"""

# Durations of trials.

TRIAL_S = 1.5
"""Time of one trial."""

TURN_S, MAX_TURNS_S = 0.5, 8.0
"""Time of the steps of a plan's turn, and of all turns of all plans after which no further rounds are made."""

MAX_TRIAL_S = 10.0
"""A trial that is predicted to take longer is left out, and so are all trials if unsharded steps take longer."""

MAX_LARGE_BATCH_S = MAX_TRIAL_S / 3
"""Maximum time of the unsharded step at the larger of two batch sizes."""

MAX_HEAP_TRIAL_S = 5.0
"""Maximum time of the heap trial at the larger of two batch sizes."""

SATURATED_STEP_S = 0.4
"""Maximum predicted time of an unsharded step on CUDA, which is to be large enough to hide kernel launches.
[M-autotune-3]"""

SLOW_STEP_S, SLOW_TRIAL_S = 0.4, 1.0
"""A step that takes longer is not timed again for the heap trial, which takes this time instead. [M-autotune-4]"""


@dataclass(frozen=True)
class StartupBudget:
    """The time that one start may take.

    Attributes:
        ranks: the ranks that start together.
        began_s: when the start began on this rank (``time.monotonic``).
        total_s: the time of the whole start; infinite for a start without a deadline.
        display: shows the stages on this rank.
    """

    ranks: RankGroup
    began_s: float
    total_s: float = STARTUP_BUDGET_S
    display: StageDisplay = field(default_factory=StageDisplay)

    @classmethod
    def for_ranks(cls, ranks: RankGroup, began_s: float, display: StageDisplay) -> StartupBudget:
        """Return the budget of a start before training."""
        total_s = EMULATED_STARTUP_BUDGET_S if ranks.is_emulated else STARTUP_BUDGET_S
        return cls(ranks, began_s, total_s, display)

    @classmethod
    def unlimited(cls, ranks: RankGroup) -> StartupBudget:
        """Return the budget of a start without a deadline, which begins now."""
        return cls(ranks, time.monotonic(), math.inf)

    def begin_stage(self, stage: str, detail: str = "") -> None:
        """Show what the start does from now on, and the time that this rank has left. Not collective."""
        elapsed_s = time.monotonic() - self.began_s
        left = f"{max(0.0, self.total_s - elapsed_s):.0f} of {self.total_s:.0f} s left"
        self.display.show(stage, detail, left if math.isfinite(self.total_s) else f"{elapsed_s:.0f} s so far")

    def elapsed_s(self) -> float:
        """Return the time since the start began on the first of the ranks. Collective: every rank must call it."""
        (elapsed_s,) = self.ranks.all_reduce_max([time.monotonic() - self.began_s])
        return elapsed_s

    def remaining_s(self) -> float:
        """Return the time that remains on the rank with least. Collective: every rank must call it."""
        return self.total_s - self.elapsed_s()

    def allows(self, duration_s: float, reserve_s: float) -> bool:
        """Return whether ``reserve_s`` remain after a trial of ``duration_s``. Collective: every rank must call it."""
        return self.remaining_s() - duration_s >= reserve_s

    def deadline(self, fraction: float | None) -> Callable[[], bool]:
        """Return a function that tells whether a search has taken ``fraction`` of the time that remains now.

        It asks this rank's clock alone. The time to apply the plan is not searched in. None is no deadline.
        """
        start_s = time.monotonic()
        available_s = self.total_s - (start_s - self.began_s) - APPLY_RESERVE_S

        def is_reached() -> bool:
            return fraction is not None and time.monotonic() - start_s > fraction * available_s

        return is_reached
