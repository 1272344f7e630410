"""The paper's Algorithm 1: walks the batch sizes, finds the best plan for each, keeps the one of best throughput.

The paper raises the batch size until not even the plan of least memory fits. Each candidate is solved exactly
(``search.solve``) against a budget, then the timeline gives its true peak; what it leaves unused is given back to the
search, and what it exceeds is taken away, until nothing more can be gained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planning.choices import Mode, legal_modes
from lightning_osdp.planning.cluster import Cluster, ComputeTimes
from lightning_osdp.planning.cost import TimeCost, memory_cost, time_cost
from lightning_osdp.planning.operators import ModelDescription
from lightning_osdp.planning.plan import (
    ExecutionPlan,
    FrontierPoint,
    ModeCost,
    ModelIdentity,
    OperatorPlan,
    PeakMoment,
    Prediction,
    SearchEnd,
)
from lightning_osdp.planning.search import Option, solve
from lightning_osdp.planning.timeline import Peak, Timeline

THROUGHPUT_TOLERANCE = 0.01
"""Of the batch sizes whose throughput is within this share of the best, the smallest is chosen: communication is
amortised ever further by larger batches, but the last percent is not worth fewer optimizer steps."""

MAX_BATCH_SIZE = 4096
"""Where the walk ends if memory never does."""

RANK_FACTORS = (2, 4, 8)
"""How many times the ranks are tried where nothing fits, to say how many would be enough."""

REFINEMENTS = 12
"""Solutions per batch size at most, while budget and true peak are brought together."""


@dataclass(frozen=True)
class Candidate:
    """The best plan found at one batch size."""

    batch_size: int
    accumulation: int
    modes: tuple[Mode, ...]
    compute_s: float
    communication_s: float
    peak: Peak
    ranks: int

    @property
    def step_time_s(self) -> float:
        """Of one optimizer step."""
        return self.compute_s + self.communication_s

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    @property
    def samples_per_s(self) -> float:
        """Over all ranks."""
        return self.global_batch_size / self.step_time_s


@dataclass(frozen=True)
class Problem:
    """Everything that the schedule decides from.

    Attributes:
        memory_limit_bytes: per device; no plan's predicted peak exceeds it.
        overhead_bytes: of the process before the model.
    """

    model: ModelDescription
    cluster: Cluster
    compute: ComputeTimes
    memory_limit_bytes: int
    overhead_bytes: int = 0


@dataclass(frozen=True)
class BatchRule:
    """Which batch sizes may be tried.

    Attributes:
        batch_size: per device and micro-batch, fixed; None to search.
        max_batch_size: upper end of the search.
        global_batch_size: if given, batch size x accumulation x ranks makes exactly this.
        accumulation: micro-batches per optimizer step where ``global_batch_size`` does not decide it.
    """

    batch_size: int | None = None
    max_batch_size: int | None = None
    global_batch_size: int | None = None
    accumulation: int = 1

    def pairs(self, ranks: int) -> Iterator[tuple[int, int]]:
        """(batch size, accumulation) to try, by rising batch size.

        Raises:
            ConfigurationError: ``global_batch_size`` can't be made from ``ranks`` (and ``batch_size``).
        """
        most = self.max_batch_size or MAX_BATCH_SIZE
        if self.global_batch_size is not None:
            yield from self._pairs_of_global(ranks, most)
        elif self.batch_size is not None:
            yield self.batch_size, self.accumulation
        else:
            size = 1
            while size <= most:
                yield size, self.accumulation
                size += max(1, size // 8)

    def end(self) -> SearchEnd:
        """Why no larger batch size is tried than the last of ``pairs``."""
        if self.batch_size is not None:
            return SearchEnd(reason="fixed")
        if self.global_batch_size is not None and self.max_batch_size is None:
            return SearchEnd(reason="global_batch_size")
        return SearchEnd(reason="maximum", batch_size=self.max_batch_size or MAX_BATCH_SIZE)

    def _pairs_of_global(self, ranks: int, most: int) -> Iterator[tuple[int, int]]:
        total = self.global_batch_size
        assert total is not None
        if total % ranks:
            near = total // ranks * ranks
            raise ConfigurationError(
                f"global_batch_size={total} is not a multiple of the {ranks} ranks: the nearest are "
                f"{near or ranks} and {near + ranks}"
            )
        per_rank = total // ranks
        if self.batch_size is not None and per_rank % self.batch_size:
            raise ConfigurationError(
                f"global_batch_size={total} on {ranks} ranks is {per_rank} per rank, which is not a multiple of "
                f"batch_size={self.batch_size}"
            )
        sizes = [self.batch_size] if self.batch_size is not None else range(1, min(per_rank, most) + 1)
        for size in sizes:
            if per_rank % size == 0:
                yield size, per_rank // size


def make_plan(problem: Problem, rule: BatchRule) -> ExecutionPlan:
    """Algorithm 1 over the batch sizes of ``rule``.

    Raises:
        InfeasibleError: not even the smallest batch fits; says what is needed, what there is, the largest operator,
            and what would fit.
        ConfigurationError: the batch sizes of ``rule`` contradict each other.
    """
    timeline = Timeline(problem.model, problem.cluster, problem.overhead_bytes)
    candidates: list[Candidate] = []
    end: SearchEnd | None = None
    for batch_size, accumulation in rule.pairs(problem.cluster.ranks):
        try:
            candidates.append(best_candidate(problem, timeline, batch_size, accumulation))
        except InfeasibleError as error:
            if not candidates:
                raise _with_remedies(error, problem, rule) from None
            end = SearchEnd(reason="memory", batch_size=batch_size, needed_bytes=error.needed_bytes)
            break
    return _to_plan(problem, choose(candidates), candidates, end or rule.end())


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The smallest batch size whose throughput is within ``THROUGHPUT_TOLERANCE`` of the best."""
    best = max(candidate.samples_per_s for candidate in candidates)
    enough = [c for c in candidates if c.samples_per_s >= (1 - THROUGHPUT_TOLERANCE) * best]
    return min(enough, key=lambda candidate: candidate.batch_size)


def best_candidate(problem: Problem, timeline: Timeline, batch_size: int, accumulation: int) -> Candidate:
    """The fastest modes at one batch size whose true peak is within the limit.

    Raises:
        InfeasibleError: none is.
    """
    menus = [_Menu(problem, index, batch_size, accumulation) for index in range(len(problem.model.operators))]
    limit = problem.memory_limit_bytes
    smallest = _smallest(problem, timeline, menus, batch_size, accumulation)
    best, low = smallest, _budget_of(menus, smallest.modes)
    high: int | None = None
    budget = low + max(0, limit - smallest.peak.total_bytes)
    for _ in range(REFINEMENTS):
        found = _candidate(problem, timeline, menus, solve_menus(menus, budget), batch_size, accumulation)
        slack = limit - found.peak.total_bytes
        if slack >= 0:
            gained = found.step_time_s < best.step_time_s
            best, low = (found if gained else best), budget
            if budget >= _largest_budget(menus):
                break
            step = slack
        else:
            high, step = budget, slack
        proposal = budget + step
        if high is not None and not low < proposal < high:
            proposal = (low + high) // 2
        if abs(proposal - budget) <= limit // 2000:
            break
        budget = proposal
    return best


class _Menu:
    """The options of one operator, as the search wants them."""

    def __init__(self, problem: Problem, index: int, batch_size: int, accumulation: int) -> None:
        operator, operator_time = problem.model.operators[index], problem.compute.operators[index]
        self.modes = legal_modes(operator)
        self.costs = [
            time_cost(operator, mode, problem.cluster, problem.compute, operator_time, batch_size, accumulation)
            for mode in self.modes
        ]
        self.options = [
            Option(cost.total_s, *memory_cost(operator, mode, problem.cluster))
            for mode, cost in zip(self.modes, self.costs, strict=True)
        ]

    def alternatives(self) -> tuple[ModeCost, ...]:
        """The options as the plan keeps them."""
        return tuple(
            ModeCost(mode=mode, **option._asdict()) for mode, option in zip(self.modes, self.options, strict=True)
        )


def solve_menus(menus: Sequence[_Menu], budget_bytes: int) -> tuple[Mode, ...]:
    """The fastest modes within a budget for states and transients."""
    solution = solve([menu.options for menu in menus], budget_bytes)
    return tuple(menu.modes[choice] for menu, choice in zip(menus, solution.choices, strict=True))


def _budget_of(menus: Sequence[_Menu], modes: Sequence[Mode]) -> int:
    """The budget that just admits ``modes``."""
    options = [menu.options[menu.modes.index(mode)] for menu, mode in zip(menus, modes, strict=True)]
    return sum(option.resident_bytes for option in options) + max(option.transient_bytes for option in options)


def _largest_budget(menus: Sequence[_Menu]) -> int:
    """A budget that admits everything."""
    return sum(max(option.resident_bytes for option in menu.options) for menu in menus) + max(
        option.transient_bytes for menu in menus for option in menu.options
    )


def _smallest(
    problem: Problem, timeline: Timeline, menus: Sequence[_Menu], batch_size: int, accumulation: int
) -> Candidate:
    """The plan of least true peak, if that is within the limit.

    Raises:
        InfeasibleError: it is not.
    """
    smallest = _least(problem, timeline, menus, batch_size, accumulation)
    if smallest.peak.total_bytes > problem.memory_limit_bytes:
        raise _infeasible(problem, smallest)
    return smallest


def _least(
    problem: Problem, timeline: Timeline, menus: Sequence[_Menu], batch_size: int, accumulation: int
) -> Candidate:
    """The plan of least true peak: of everything sharded, and what the search needs at least.

    The two differ where one operator dominates: gathering it costs more than sharding its states saves.
    """
    try:
        solve([menu.options for menu in menus], 0)
        needed = 0
    except InfeasibleError as error:
        needed = error.needed_bytes
    plans = {tuple(menu.modes[-1] for menu in menus), solve_menus(menus, needed)}
    found = [_candidate(problem, timeline, menus, modes, batch_size, accumulation) for modes in sorted(plans)]
    return min(found, key=lambda candidate: candidate.peak.total_bytes)


def least_bytes(problem: Problem, batch_size: int, accumulation: int = 1) -> int:
    """Peak of the plan that takes least memory at one batch size, whatever the limit."""
    menus = [_Menu(problem, index, batch_size, accumulation) for index in range(len(problem.model.operators))]
    timeline = Timeline(problem.model, problem.cluster, problem.overhead_bytes)
    return _least(problem, timeline, menus, batch_size, accumulation).peak.total_bytes


def _mib(amount: float) -> str:
    return f"{amount / (1 << 20):,.0f} MiB"


def _whole_mib(amount: int) -> str:
    """Rounded up, so that a limit of it is enough."""
    return f"{-(-amount >> 20):,} MiB"


def _infeasible(problem: Problem, smallest: Candidate) -> InfeasibleError:
    operators = problem.model.operators
    largest = max(range(len(operators)), key=lambda i: sum(p.state_bytes for p in operators[i].parameters))
    operator, peak = operators[largest], smallest.peak
    return InfeasibleError(
        f"nothing fits: batch size {smallest.batch_size} needs at least {_whole_mib(peak.total_bytes)} per device, the "
        f"limit is {_mib(problem.memory_limit_bytes)}. Of that peak (in the {peak.where}), the process takes "
        f"{_mib(peak.overhead)}, states and gradients {_mib(peak.states + peak.gradients)}, gathered parameters and "
        f"transients {_mib(peak.gathered + peak.transient)}, activations {_mib(peak.activations)}. The largest "
        f"operator is {operator.name or 'the whole model'} ({operator.kind}, {operator.num_parameters:,} parameters)",
        needed_bytes=peak.total_bytes,
        budget_bytes=problem.memory_limit_bytes,
        largest=largest,
    )


def _with_remedies(error: InfeasibleError, problem: Problem, rule: BatchRule) -> InfeasibleError:
    """The same error with what would make it fit, each worked out as a plan of least memory."""
    would = [f"a memory_limit of {_whole_mib(error.needed_bytes)}"]
    would_not: list[str] = []
    batch_size, accumulation = next(rule.pairs(problem.cluster.ranks))
    if batch_size > 1:
        fits = _largest_batch_size(problem, batch_size - 1, accumulation)
        least = _whole_mib(least_bytes(problem, max(1, fits), accumulation))
        (would if fits else would_not).append(f"batch size {max(1, fits)} (needs {least})")
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


def _largest_batch_size(problem: Problem, most: int, accumulation: int) -> int:
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


def _candidate(
    problem: Problem,
    timeline: Timeline,
    menus: Sequence[_Menu],
    modes: tuple[Mode, ...],
    batch_size: int,
    accumulation: int,
) -> Candidate:
    costs = [menu.costs[menu.modes.index(mode)] for menu, mode in zip(menus, modes, strict=True)]
    return candidate_from(problem, timeline, modes, costs, batch_size, accumulation)


def candidate_from(
    problem: Problem,
    timeline: Timeline,
    modes: tuple[Mode, ...],
    costs: Sequence[TimeCost],
    batch_size: int,
    accumulation: int,
) -> Candidate:
    """What ``modes`` take in all, whether they fit or not; ``costs`` is what each operator takes under its mode."""
    outside_s = accumulation * problem.compute.outside.at(batch_size)
    return Candidate(
        batch_size=batch_size,
        accumulation=accumulation,
        modes=modes,
        compute_s=outside_s + sum(cost.compute_s for cost in costs),
        communication_s=sum(cost.communication_s for cost in costs),
        peak=timeline.peak(modes, batch_size, accumulation),
        ranks=problem.cluster.ranks,
    )


def _to_plan(problem: Problem, chosen: Candidate, candidates: Sequence[Candidate], end: SearchEnd) -> ExecutionPlan:
    model, peak = problem.model, chosen.peak
    menus = [_Menu(problem, index, chosen.batch_size, chosen.accumulation) for index in range(len(model.operators))]
    return ExecutionPlan(
        model=ModelIdentity(
            fingerprint=model.fingerprint,
            num_parameters=model.num_parameters,
            flops_per_sample=model.flops_per_sample,
        ),
        cluster=problem.cluster,
        memory_limit_bytes=problem.memory_limit_bytes,
        batch_size=chosen.batch_size,
        accumulate_grad_batches=chosen.accumulation,
        global_batch_size=chosen.global_batch_size,
        operators=tuple(
            OperatorPlan(
                name=op.name,
                slices=(mode,),
                num_parameters=op.num_parameters,
                pinned=op.pinned,
                alternatives=menu.alternatives(),
            )
            for op, mode, menu in zip(model.operators, chosen.modes, menus, strict=True)
        ),
        predicted=Prediction(
            step_time_s=chosen.step_time_s,
            compute_time_s=chosen.compute_s,
            communication_time_s=chosen.communication_s,
            samples_per_s=chosen.samples_per_s,
            peak_memory_bytes=chosen.peak.total_bytes,
            overhead_bytes=problem.overhead_bytes,
        ),
        frontier=tuple(
            FrontierPoint(batch_size=c.batch_size, samples_per_s=c.samples_per_s, peak_memory_bytes=c.peak.total_bytes)
            for c in candidates
        ),
        # At the budget that just admits the chosen modes.
        price_s_per_byte=solve([menu.options for menu in menus], _budget_of(menus, chosen.modes)).price_s_per_byte,
        peak=PeakMoment(
            where=peak.where,
            states=round(peak.states),
            gradients=round(peak.gradients),
            gathered=round(peak.gathered),
            transient=round(peak.transient),
            activations=round(peak.activations),
            overhead=round(peak.overhead),
        ),
        search_end=end,
    )
