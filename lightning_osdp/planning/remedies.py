"""What to say where nothing fits: what is needed, what there is, and what would help, each worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.batches import BatchRule
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.space import Problem
from lightning_osdp.planning.timeline import Peak

RANK_FACTORS = (2, 4, 8)
"""How many times the ranks are tried, to say how many would be enough."""

LeastBytes = Callable[[Problem, int, int], int]
"""(problem, batch size, accumulation) -> peak of the plan that takes least memory."""


def nothing_fits(problem: Problem, peak: Peak, batch_size: int) -> InfeasibleError:
    """The error for a problem whose smallest plan has ``peak``."""
    operators, between = problem.model.operators, ""
    if peak.most_bytes > peak.total_bytes:
        what = "saving a checkpoint" if peak.saving_bytes == peak.most_bytes else "evaluation"
        between = f" for {what} ({_whole_mib(peak.total_bytes)} for a step)"
    largest = max(range(len(operators)), key=lambda i: sum(p.state_bytes for p in operators[i].parameters))
    operator = operators[largest]
    whole = f"; it can't be split: {operator.unsplittable}" if operator.unsplittable else ""
    return InfeasibleError(
        f"nothing fits: batch size {batch_size} needs at least {_whole_mib(peak.most_bytes)} per device{between}, "
        f"the limit is {_mib(problem.memory_limit_bytes)}. Of the step's peak (in the {peak.where}), the process takes "
        f"{_mib(peak.overhead)}, states and gradients {_mib(peak.states + peak.gradients)}, gathered parameters and "
        f"transients {_mib(peak.gathered + peak.transient)}, activations {_mib(peak.activations)}. The largest "
        f"operator is {operator.name or 'the whole model'} ({operator.kind}, {operator.num_parameters:,} parameters"
        f"{whole})",
        needed_bytes=peak.most_bytes,
        budget_bytes=problem.memory_limit_bytes,
        largest=largest,
    )


def with_remedies(
    error: InfeasibleError, problem: Problem, rule: BatchRule, least_bytes: LeastBytes
) -> InfeasibleError:
    """The same error with what would make it fit, each worked out as a plan of least memory."""
    would = [f"a memory_limit of {_whole_mib(error.needed_bytes)}"]
    would_not: list[str] = []
    batch_size, accumulation = next(rule.pairs(problem.cluster.ranks))
    if batch_size > 1:
        fits = _largest_batch_size(problem, batch_size - 1, accumulation, least_bytes)
        least = _whole_mib(least_bytes(problem, max(1, fits), accumulation))
        (would if fits else would_not).append(f"batch size {max(1, fits)} (needs {least})")
    for words, freer in _lifted(problem):
        needed = least_bytes(freer, batch_size, accumulation)
        if needed < error.needed_bytes:
            enough = needed <= problem.memory_limit_bytes
            (would if enough else would_not).append(f"{words} (needs {_whole_mib(needed)})")
    tried: list[str] = []
    for factor in RANK_FACTORS:
        more = replace(problem, cluster=_with_more_ranks(problem.cluster, factor))
        try:
            pair = next(rule.pairs(more.cluster.ranks))
        except ConfigurationError:  # so many ranks can't make the global batch size
            continue
        needed = least_bytes(more, *pair)
        tried = [f"{more.cluster.ranks} ranks (needs {_whole_mib(needed)} on each)"]
        if needed <= problem.memory_limit_bytes:
            would, tried = would + tried, []
            break
    would_not += tried
    text = f"{error}. What would fit: {', or '.join(would)}"
    text += f". Not enough: {', nor '.join(would_not)}" if would_not else ""
    return InfeasibleError(
        text, needed_bytes=error.needed_bytes, budget_bytes=error.budget_bytes, largest=error.largest
    )


def _lifted(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The same problem with splitting or recomputing left to the search, where a wish keeps it from that, or with
    checkpoints for which nothing becomes whole."""
    wishes = problem.wishes
    if problem.between.saving != "nothing":
        between = problem.between.model_copy(update={"saving": "nothing"})
        words = "checkpoints of which every rank saves its part (save_format='sharded')"
        yield words, replace(problem, between=between)
    splitting = wishes.slice_granularity != "auto"
    recomputing = wishes.activation_checkpointing != "auto" and wishes.activation_checkpointing is not True
    if splitting:
        freer = replace(wishes, slice_granularity="auto")
        yield "operators split as the search sees fit (slice_granularity='auto')", replace(problem, wishes=freer)
    if recomputing:
        freer = replace(wishes, activation_checkpointing="auto")
        yield "blocks recomputed (activation_checkpointing='auto')", replace(problem, wishes=freer)
    if splitting and recomputing:
        freer = replace(wishes, slice_granularity="auto", activation_checkpointing="auto")
        yield "both of these", replace(problem, wishes=freer)


def _largest_batch_size(problem: Problem, most: int, accumulation: int, least_bytes: LeastBytes) -> int:
    """Largest batch size up to ``most`` at which something fits, by bisection; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if least_bytes(problem, middle, accumulation) <= problem.memory_limit_bytes:
            low = middle
        else:
            high = middle - 1
    return low


def _with_more_ranks(cluster: Cluster, factor: int) -> Cluster:
    """More nodes where there are several, else more devices in the one."""
    field = "nodes" if cluster.nodes > 1 else "devices_per_node"
    return cluster.model_copy(update={field: getattr(cluster, field) * factor})


def _mib(amount: float) -> str:
    return f"{amount / (1 << 20):,.0f} MiB"


def _whole_mib(amount: int) -> str:
    """Rounded up, so that a limit of it is enough."""
    return f"{-(-amount >> 20):,} MiB"
