"""What to say where nothing fits: what is needed, what there is, and what would help, each worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.cost.memory_timeline import Peak
from lightning_osdp.planning.spec.batch_sizes import BatchSizePolicy
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.problem import Problem

RANK_FACTORS = (2, 4, 8)
"""How many times the ranks are tried, to say how many would be enough."""

MinMemoryBytesFn = Callable[[Problem, int, int], int]
"""(problem, batch size, accumulation) -> peak of the plan that takes least memory."""


def infeasible_error(problem: Problem, peak: Peak, batch_size: int) -> InfeasibleError:
    """The error for a problem whose smallest plan has ``get_peak_flops``."""
    operators, between = problem.model.operators, ""
    if peak.max_bytes > peak.total_bytes:
        what = "saving a checkpoint" if peak.saving_bytes == peak.max_bytes else "evaluation"
        between = f" for {what} ({_format_mib_rounded_up(peak.total_bytes)} for a step)"
    largest = max(range(len(operators)), key=lambda i: sum(p.state_bytes for p in operators[i].parameters))
    operator = operators[largest]
    whole = f"; it can't be split: {operator.unsplittable_reason}" if operator.unsplittable_reason else ""
    return InfeasibleError(
        f"nothing fits: batch size {batch_size} needs at least {_format_mib_rounded_up(peak.max_bytes)} per device{between}, "
        f"the limit is {_format_mib(problem.memory_limit_bytes)}. Of the step's peak (in the {peak.where}), the process takes "
        f"{_format_mib(peak.overhead)}, states and gradients {_format_mib(peak.states + peak.gradients)}, gathered parameters and "
        f"transients {_format_mib(peak.gathered + peak.transient)}, activations {_format_mib(peak.activations)}. The largest "
        f"operator is {operator.name or 'the whole model'} ({operator.kind}, {operator.num_parameters:,} parameters"
        f"{whole})",
        needed_bytes=peak.max_bytes,
        budget_bytes=problem.memory_limit_bytes,
        largest=largest,
    )


def with_suggestions(
    error: InfeasibleError, problem: Problem, policy: BatchSizePolicy, min_memory_bytes: MinMemoryBytesFn
) -> InfeasibleError:
    """The same error with what would make it fit, each worked out as a plan of least memory."""
    would = [f"a memory_limit of {_format_mib_rounded_up(error.needed_bytes)}"]
    would_not: list[str] = []
    batch_size, accumulation = next(policy.candidates(problem.cluster.ranks))
    if batch_size > 1:
        fits = _largest_batch_size(problem, batch_size - 1, accumulation, min_memory_bytes)
        least = _format_mib_rounded_up(min_memory_bytes(problem, max(1, fits), accumulation))
        (would if fits else would_not).append(f"batch size {max(1, fits)} (needs {least})")
    for words, freer in _relaxed_problems(problem):
        needed = min_memory_bytes(freer, batch_size, accumulation)
        if needed < error.needed_bytes:
            enough = needed <= problem.memory_limit_bytes
            (would if enough else would_not).append(f"{words} (needs {_format_mib_rounded_up(needed)})")
    tried: list[str] = []
    for factor in RANK_FACTORS:
        more = replace(problem, cluster=_with_more_ranks(problem.cluster, factor))
        try:
            pair = next(policy.candidates(more.cluster.ranks))
        except ConfigurationError:  # so many ranks can't make the global batch size
            continue
        needed = min_memory_bytes(more, *pair)
        tried = [f"{more.cluster.ranks} ranks (needs {_format_mib_rounded_up(needed)} on each)"]
        if needed <= problem.memory_limit_bytes:
            would, tried = would + tried, []
            break
    would_not += tried
    text = f"{error}. What would fit: {', or '.join(would)}"
    text += f". Not enough: {', nor '.join(would_not)}" if would_not else ""
    return InfeasibleError(
        text, needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes, largest=error.largest
    )


def _relaxed_problems(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The same problem with splitting or recomputing left to the search, where a wish keeps it from that, or with
    checkpoints for which nothing becomes whole."""
    wishes = problem.constraints
    if problem.non_training.checkpoint_memory != "nothing":
        between = problem.non_training.model_copy(update={"checkpoint_memory": "nothing"})
        words = "checkpoints of which every rank saves its part (save_format='sharded')"
        yield words, replace(problem, non_training=between)
    splitting = wishes.slice_granularity != "auto"
    recomputing = wishes.activation_checkpointing != "auto" and wishes.activation_checkpointing is not True
    if splitting:
        freer = replace(wishes, slice_granularity="auto")
        yield "operators split as the search sees fit (slice_granularity='auto')", replace(problem, constraints=freer)
    if recomputing:
        freer = replace(wishes, activation_checkpointing="auto")
        yield "blocks recomputed (activation_checkpointing='auto')", replace(problem, constraints=freer)
    if splitting and recomputing:
        freer = replace(wishes, slice_granularity="auto", activation_checkpointing="auto")
        yield "both of these", replace(problem, constraints=freer)


def _largest_batch_size(
    problem: Problem, max_batch_size: int, accumulation: int, min_memory_bytes: MinMemoryBytesFn
) -> int:
    """Largest batch size up to ``max_batch_size`` at which something fits, by bisection; 0 if none."""
    low, high = 0, max_batch_size
    while low < high:
        middle = (low + high + 1) // 2
        if min_memory_bytes(problem, middle, accumulation) <= problem.memory_limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _with_more_ranks(cluster: Cluster, factor: int) -> Cluster:
    """More nodes where there are several, else more devices in the one."""
    field = "nodes" if cluster.nodes > 1 else "devices_per_node"
    return cluster.model_copy(update={field: getattr(cluster, field) * factor})


def _format_mib(amount: float) -> str:
    return f"{amount / (1 << 20):,.0f} MiB"


def _format_mib_rounded_up(amount: int) -> str:
    """Rounded up, so that a limit of it is enough."""
    return f"{-(-amount >> 20):,} MiB"
