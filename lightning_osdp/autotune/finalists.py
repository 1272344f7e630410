"""Search, try the plan that was found in turns with simple plans, and search again with what the trials have shown.

All functions are collective: every rank must call them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_osdp.autotune.coordinator import UNTRIED_PLAN_MARGIN, MemoryBudget, PlanningCoordinator
from lightning_osdp.autotune.profile import Profile
from lightning_osdp.autotune.ranks import resolve_cluster
from lightning_osdp.autotune.startup_budget import APPLY_RESERVE_S, FIRST_SEARCH_FRACTION
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.autotune.trials import TrialSetup, run_plan_trials
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planning.cost.trial_correction import TRIAL_RELATIVE_ERROR, Trial, apply_trial, trials_of_plan
from lightning_osdp.planning.search.finalists import pick_untried
from lightning_osdp.planning.search.plan_selection import add_trials
from lightning_osdp.planning.spec.plan import ExecutionPlan

log_info = rank_zero_only(logging.getLogger(__name__).info)

MAX_PLAN_TRIALS = 2
"""Maximum number of searches in one start whose plan is tried."""

MIN_MEMORY_GAIN = 0.01
"""Relative gain of memory for the model that is worth another search. After the first one less has to be reserved for
what a start leaves behind, which counts where a rank has little memory."""


def search_and_trial(
    coordinator: PlanningCoordinator, profile: Profile, memory_budget: MemoryBudget, trial_context: TrialContext | None
) -> tuple[ExecutionPlan, Profile, MemoryBudget]:
    """Return the plan, and measurements and memory as they are after its trials (steps 5 to 7).

    If plans could be tried, it is one of them, unless one that still fits promises much more. Else a simple plan is
    preferred (``pick_untried``).
    """
    budget = coordinator.budget
    began_s = budget.elapsed_s()
    plan = coordinator.search(profile, memory_budget, TRIAL_RELATIVE_ERROR, FIRST_SEARCH_FRACTION)  # step 5
    search_s = budget.elapsed_s() - began_s
    was_cut_short = search_s >= FIRST_SEARCH_FRACTION * (budget.total_s - began_s - APPLY_RESERVE_S)
    if coordinator.ranks.is_offline:
        return plan, profile, memory_budget
    finalists = coordinator.find_finalists(profile, memory_budget, plan)
    tried: list[ExecutionPlan] = []
    tried_now: list[Trial] = []
    chosen: ExecutionPlan | None = None
    for searches_left in reversed(range(MAX_PLAN_TRIALS)):
        began_s = budget.elapsed_s()
        trials = _try_plans(coordinator, profile, finalists, trial_context)  # step 6
        if not trials:
            break
        tried_now += [trial for trial in trials if trial not in profile.trials]
        profile = profile.model_copy(update={"trials": add_trials(profile.trials, trials)})
        memory_budget = coordinator.memory_budget("tried")
        tried += [one for one in finalists if one is not chosen and trials_of_plan(one, trials)]
        chosen = coordinator.choose_tried_plan(profile, memory_budget, tried)
        trial_s = budget.elapsed_s() - began_s
        if chosen is None:  # trials have left something behind, and the plans were the last that fit
            return search_or_take(coordinator, profile, memory_budget, plan)
        if not searches_left or budget.remaining_s() - APPLY_RESERVE_S <= search_s + trial_s:
            break
        plan = coordinator.search(profile, memory_budget, TRIAL_RELATIVE_ERROR, FIRST_SEARCH_FRACTION)  # step 7
        if trials_of_plan(plan, profile.trials):
            break
        finalists = [plan, chosen]
    if chosen is not None:
        if len(chosen.tried) < len(tried):  # trials have left something behind, and the others do not fit beside it
            found, _, _ = search_or_take(coordinator, profile, memory_budget, chosen, TRIAL_RELATIVE_ERROR)
            chosen = chosen if trials_of_plan(found, profile.trials) else found
        if _ran_at_own_batch_size(chosen, tried_now):
            memory_budget = coordinator.memory_budget("compiled")
            chosen = coordinator.repredict_memory(profile, memory_budget, chosen)
        return chosen, profile, memory_budget
    # With neither more time nor more memory than the first one, another search finds nothing better.
    now = coordinator.memory_budget("searched")
    is_roomier = now.model > (1 + MIN_MEMORY_GAIN) * memory_budget.model
    if (was_cut_short or is_roomier) and budget.remaining_s() - APPLY_RESERVE_S > search_s:
        memory_budget = now if is_roomier else memory_budget
        plan = coordinator.search(profile, memory_budget, UNTRIED_PLAN_MARGIN, 1.0)
        finalists = coordinator.find_finalists(profile, memory_budget, plan) if is_roomier else [plan, *finalists]
    return _take_untried(finalists), profile, memory_budget


def _ran_at_own_batch_size(plan: ExecutionPlan, trials: Sequence[Trial]) -> bool:
    """Return whether one of these trials ran exactly what is planned: what waits then is known of no other trial."""
    return any(trial.exposed_comm_s is not None for trial in trials_of_plan(plan, trials))


def _take_untried(finalists: Sequence[ExecutionPlan]) -> ExecutionPlan:
    """Return the plan to take of those that could not be tried."""
    plan = pick_untried(finalists)
    if plan is not finalists[0]:
        log_info("the plan found can't be tried, and promises little more than a simpler one, which is taken")
    return plan


def search_or_take(
    coordinator: PlanningCoordinator,
    profile: Profile,
    memory_budget: MemoryBudget,
    plan: ExecutionPlan,
    required_gain: float = UNTRIED_PLAN_MARGIN,
) -> tuple[ExecutionPlan, Profile, MemoryBudget]:
    """Return a plan that fits what memory there is; ``plan`` if none does.

    Args:
        coordinator: searches.
        profile: the measurements.
        memory_budget: the memory that there is.
        plan: the plan to take otherwise.
        required_gain: gain that an untried plan must promise over a tried one; less where one like it was tried.
    """
    try:
        found = coordinator.search(profile, memory_budget, required_gain, 1.0)
    except InfeasibleError:
        found = apply_trial(plan, profile.trials)
    return found, profile, memory_budget


def _try_plans(
    coordinator: PlanningCoordinator,
    profile: Profile,
    plans: Sequence[ExecutionPlan],
    trial_context: TrialContext | None,
) -> list[Trial]:
    """Step 6. Return trials of the plans: the known ones if all were tried before, else new ones, in turns.

    Empty if the first plan can't be tried, or none may be.
    """
    if trial_context is None:
        return []
    known = [trial for plan in plans for trial in trials_of_plan(plan, profile.trials)]
    if len(known) == len(plans):
        return known
    return run_plan_trials(
        make_trial_setup(coordinator, profile, trial_context), profile.compute_for, plans, APPLY_RESERVE_S
    )


def make_trial_setup(coordinator: PlanningCoordinator, profile: Profile, trial_context: TrialContext) -> TrialSetup:
    """Return what the trials of this start share."""
    cluster = resolve_cluster(coordinator.ranks, coordinator.request.cluster, profile)
    return TrialSetup(
        trial_context,
        coordinator.model,
        coordinator.batch_sizes,
        [size for size, _ in coordinator.request.policy.candidates(cluster.ranks)],
        coordinator.ranks,
        cluster,
        coordinator.free_bytes,
        coordinator.budget,
    )
