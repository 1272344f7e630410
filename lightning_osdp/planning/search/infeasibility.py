"""Errors for problems that nothing fits: need, limit, breakdown, and which remedies are enough, each worked out."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.problem import Problem

RANK_FACTORS = (2, 4, 8)
"""Factors on the number of ranks that are tried to say how many would be enough."""

MinMemoryBytesFn = Callable[[Problem, int, int], int]
"""(problem, batch size, accumulation) -> peak of the plan of least memory in bytes."""


def infeasible_error(problem: Problem, peak: Peak, batch_size: int) -> InfeasibleError:
    """Return the error for a problem whose plan of least memory has ``peak``."""
    detail = ""
    if peak.max_bytes > peak.total_bytes:
        saves = problem.non_training.checkpoint_memory != "nothing"
        work = "saving a checkpoint" if saves else "averaging weights"
        work = work if peak.saving_bytes == peak.max_bytes else "evaluation"
        detail = f" for {work} ({_format_mib_rounded_up(peak.total_bytes)} for a step)"
    operators = problem.model.operators
    largest = max(range(len(operators)), key=lambda index: sum(p.state_bytes for p in operators[index].parameters))
    operator = operators[largest]
    unsplit = f"; it can't be split: {operator.unsplittable_reason}" if operator.unsplittable_reason else ""
    return InfeasibleError(
        f"nothing fits{_modes_text(problem)}: batch size {batch_size} needs at least "
        f"{_format_mib_rounded_up(peak.max_bytes)} per device{detail}, the limit is "
        f"{_format_mib(problem.memory_limit_bytes)}. Of the step's peak (in the {peak.where}), "
        f"the process takes {_format_mib(peak.overhead)}, states and gradients "
        f"{_format_mib(peak.states + peak.gradients)}, gathered parameters and transients "
        f"{_format_mib(peak.gathered + peak.transient)}, activations {_format_mib(peak.activations)}. The largest "
        f"operator is {operator.name or 'the whole model'} ({operator.kind}, {operator.num_parameters:,} parameters"
        f"{unsplit})",
        needed_bytes=peak.max_bytes,
        budget_bytes=problem.memory_limit_bytes,
        largest=largest,
    )


def with_suggestions(
    error: InfeasibleError, problem: Problem, policy: BatchSizePolicy, min_memory_bytes: MinMemoryBytesFn
) -> InfeasibleError:
    """Return the error with the remedies that would make the problem fit, each worked out as a plan of least memory."""
    enough = [f"a memory_limit of {_format_mib_rounded_up(error.needed_bytes)}"]
    not_enough: list[str] = []
    batch_size, accumulation = next(policy.candidates(problem.cluster.ranks))
    if batch_size > 1:
        fits = _largest_batch_size(problem, batch_size - 1, accumulation, min_memory_bytes)
        needed = min_memory_bytes(problem, max(1, fits), accumulation)
        remedy = f"batch size {max(1, fits)} (needs {_format_mib_rounded_up(needed)})"
        (enough if fits else not_enough).append(remedy)
    for words, relaxed in _relaxed_problems(problem):
        needed = min_memory_bytes(relaxed, batch_size, accumulation)
        if needed < error.needed_bytes:
            remedy = f"{words} (needs {_format_mib_rounded_up(needed)})"
            (enough if needed <= problem.memory_limit_bytes else not_enough).append(remedy)
    largest_tried: list[str] = []
    for factor in RANK_FACTORS:
        scaled = replace(problem, cluster=_with_more_ranks(problem.cluster, factor))
        try:
            batch = next(policy.candidates(scaled.cluster.ranks))
        except ConfigurationError:  # the global batch size can't be split over these ranks
            continue
        needed = min_memory_bytes(scaled, *batch)
        remedy = f"{scaled.cluster.ranks} ranks (needs {_format_mib_rounded_up(needed)} on each)"
        if needed <= problem.memory_limit_bytes:
            enough, largest_tried = [*enough, remedy], []
            break
        largest_tried = [remedy]
    not_enough += largest_tried
    text = f"{error}. What would fit: {', or '.join(enough)}"
    text += f". Not enough: {', nor '.join(not_enough)}" if not_enough else ""
    return InfeasibleError(
        text, needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes, largest=error.largest
    )


def _relaxed_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield problems with one restriction lifted: checkpoints that need whole tensors, modes, slices, recomputing."""
    constraints, non_training = problem.constraints, problem.non_training
    if non_training.checkpoint_memory != "nothing":
        sharded = non_training.model_copy(update={"checkpoint_memory": "nothing"})
        words = "checkpoints of which every rank saves its part (save_format='sharded')"
        yield words, replace(problem, non_training=sharded)
    lifted: dict[str, Any] = {}
    for argument, words in (
        ("modes", "modes that the search chooses (modes='auto')"),
        ("tensor_parallel", "operators cut over ranks as the search sees fit (tensor_parallel='auto')"),
        ("slice_granularity", "operators split as the search sees fit (slice_granularity='auto')"),
        ("activation_checkpointing", "blocks recomputed (activation_checkpointing='auto')"),
    ):
        value = getattr(constraints, argument)
        if value != "auto" and not (argument == "activation_checkpointing" and value is True):
            free: dict[str, Any] = {argument: "auto"}
            lifted |= free
            yield words, replace(problem, constraints=replace(constraints, **free))
    if len(lifted) > 1:
        words = f"{'both' if len(lifted) == 2 else 'all'} of these"
        yield words, replace(problem, constraints=replace(constraints, **lifted))


def _modes_text(problem: Problem) -> str:
    """Say that the user chose the modes, if so; starts with a blank."""
    modes = problem.constraints.modes
    if modes == "auto":
        return ""
    return f" with modes={modes!r}" if isinstance(modes, str) else " with the modes that you asked for"


def _largest_batch_size(
    problem: Problem, max_batch_size: int, accumulation: int, min_memory_bytes: MinMemoryBytesFn
) -> int:
    """Return the largest batch size up to ``max_batch_size`` at which something fits, by bisection; 0 if none."""

    def needed_bytes(size: int) -> int:
        return min_memory_bytes(problem, size, accumulation)

    return bisect(range(1, max_batch_size + 1), problem.memory_limit_bytes, key=needed_bytes)


def _with_more_ranks(cluster: Cluster, factor: int) -> Cluster:
    """Return the cluster with more nodes if there are several, else with more devices in its node."""
    field = "nodes" if cluster.nodes > 1 else "devices_per_node"
    return cluster.model_copy(update={field: getattr(cluster, field) * factor})


def _format_mib(amount: float) -> str:
    return f"{amount / (1 << 20):,.0f} MiB"


def _format_mib_rounded_up(amount: int) -> str:
    """Format bytes rounded up, so that a limit of that size is enough."""
    return f"{-(-amount >> 20):,} MiB"
