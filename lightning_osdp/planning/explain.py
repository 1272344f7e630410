"""Why a plan is what it is, and how two plans differ, in words and as values. Reads nothing but plans.

The plan holds what the search saw: the cost of each mode of each operator, and the price of memory at the limit (the
dual of the linear relaxation: seconds that one more byte would save). An operator's mode pays if no other mode is
faster by more than the memory that it takes in addition is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import Frozen
from lightning_osdp.planning.peak import explain_peak
from lightning_osdp.planning.plan import ExecutionPlan, FrontierPoint, ModeCost, OperatorPlan, Prediction
from lightning_osdp.planning.runs import Run, group_runs
from lightning_osdp.planning.schedule import THROUGHPUT_TOLERANCE
from lightning_osdp.planning.units import format_bytes, format_count, format_seconds

MODE_WORDS = {
    Mode.DP: "replicated",
    Mode.ZDP2: "sharded, gathered once a step",
    Mode.ZDP: "sharded, gathered twice a step",
}


class Reason(Frozen):
    """Why some operators have their mode."""

    operators: tuple[str, ...]
    """Patterns of their names, a range where a number counts up: ``blocks.0-7.qkv``."""
    mode: str
    count: int
    num_parameters: int
    text: str


class Explanation(Frozen):
    """A plan in words: whole sentences, one line each."""

    batch_size: str
    """Why not a smaller or a larger one."""
    memory: str
    """Where the peak is and what makes it up; empty if the plan does not say."""
    price: str
    """What memory is worth; empty if the plan does not say."""
    operators: tuple[Reason, ...]

    def to_text(self) -> str:
        """All of it as paragraphs, the operators' as ``NAME: MODE. REASON``."""
        lines = [line for line in (self.batch_size, self.memory, self.price) if line]
        lines += [f"{', '.join(reason.operators)}: {reason.mode}. {reason.text}".rstrip() for reason in self.operators]
        return "\n".join(lines)


class Change(Frozen):
    """One thing that differs, as text; empty where one side has none."""

    what: str
    before: str
    after: str
    relative: float | None = None
    """(after - before) / before, where both are numbers and before is not 0."""


class Difference(Frozen):
    """What differs from one plan to another; all empty if they decide and predict the same."""

    problem: tuple[Change, ...]
    """What they were made for: model, hardware, limit."""
    decision: tuple[Change, ...]
    """Batch size, accumulation, and modes by runs of operators."""
    prediction: tuple[Change, ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """All of them."""
        return self.problem + self.decision + self.prediction

    def to_text(self) -> str:
        """One line for each change: ``WHAT: BEFORE -> AFTER (+1.0%)``."""
        if not self.changes:
            return "no difference"
        return "\n".join(_change_line(change) for change in self.changes)


def explain(plan: ExecutionPlan) -> str:
    """Why ``plan`` is what it is: its batch size, its peak, the price of memory, and the mode of each run of operators.

    A plan that was written by hand or by an earlier release may not hold the reasons; what can be said is said.
    """
    return explanation(plan).to_text()


def explanation(plan: ExecutionPlan) -> Explanation:
    """``explain`` as a value, for JSON."""
    reasons = [(run, _reason(plan, run)) for run in group_runs(plan.operators)]
    return Explanation(
        batch_size=_batch_size_text(plan),
        memory=_memory_text(plan),
        price=_price_text(plan),
        operators=tuple(_joined(reasons)),
    )


def diff(a: ExecutionPlan, b: ExecutionPlan) -> str:
    """What differs from ``a`` to ``b``, one line each; ``no difference`` if they decide and predict the same."""
    return difference(a, b).to_text()


def difference(a: ExecutionPlan, b: ExecutionPlan) -> Difference:
    """``diff`` as a value, for JSON."""
    decision = [
        _number("batch size", a.batch_size, b.batch_size),
        _number("accumulated batches", a.accumulate_grad_batches, b.accumulate_grad_batches),
        _number("global batch size", a.global_batch_size, b.global_batch_size),
    ]
    return Difference(
        problem=_changed(_problem_changes(a, b)),
        decision=_changed(decision) + _mode_changes(a.operators, b.operators),
        prediction=_changed(_prediction_changes(a.predicted, b.predicted)),
    )


# -- the batch size and the memory -------------------------------------------------------------------------------------


def _batch_size_text(plan: ExecutionPlan) -> str:
    start = f"batch size {plan.batch_size}"
    end = plan.search_end
    if end is not None and end.reason == "fixed":
        return f"{start}: fixed, not searched."
    points = {point.batch_size: point for point in plan.frontier}
    if plan.batch_size not in points:
        return f"{start}: the plan does not say what else was tried."
    own, others = points[plan.batch_size], sorted(points)
    below = [size for size in others if size < plan.batch_size]
    sentences = [_compared(points[below[-1]], own)] if below else []
    best = max(plan.frontier, key=lambda point: point.samples_per_s)
    if best.batch_size > plan.batch_size:
        sentences.append(
            f"{_compared(best, own)}, within the tolerance of {THROUGHPUT_TOLERANCE:.0%}: larger batches amortise "
            "communication ever further, but the last percent is not worth fewer optimizer steps"
        )
    elif plan.batch_size != others[-1]:
        sentences.append(_compared(points[others[others.index(plan.batch_size) + 1]], own))
    return ". ".join([start, *sentences, _end_text(plan)]) + "."


def _compared(point: FrontierPoint, own: FrontierPoint) -> str:
    """``Batch size 8 would be 1.0% faster``, in samples per second."""
    share = point.samples_per_s / own.samples_per_s - 1
    if abs(share) < 5e-4:
        return f"Batch size {point.batch_size} would be as fast"
    return f"Batch size {point.batch_size} would be {abs(share):.1%} {'faster' if share > 0 else 'slower'}"


def _end_text(plan: ExecutionPlan) -> str:
    end, largest = plan.search_end, max(point.batch_size for point in plan.frontier)
    if end is None:
        return f"The largest tried was {largest}"
    if end.reason == "memory":
        needed = format_bytes(end.needed_bytes or 0)
        limit = format_bytes(plan.memory_limit_bytes)
        return f"Batch size {end.batch_size} does not fit: its smallest plan needs {needed} of {limit}"
    if end.reason == "maximum":
        return f"The largest allowed is {end.batch_size}"
    return f"Larger ones than {largest} can't make the global batch size of {plan.global_batch_size}"


def _memory_text(plan: ExecutionPlan) -> str:
    used = format_bytes(plan.predicted.peak_memory_bytes)
    start = f"memory: {used} of {format_bytes(plan.memory_limit_bytes)}"
    peak = plan.peak
    if peak is None:
        return f"{start}."
    return f"{start}, {explain_peak(peak)}."


def _price_text(plan: ExecutionPlan) -> str:
    price = plan.price_s_per_byte
    if price is None:
        return ""
    if not price:
        return "price of memory: nothing. Every operator that may choose has its fastest mode."
    return f"price of memory: one more MiB would save about {format_seconds(price * (1 << 20))} a step."


# -- the operators -----------------------------------------------------------------------------------------------------


class _Exchange(NamedTuple):
    """What another mode would change for a run of operators; negative: less."""

    mode: Mode
    time_s: float
    bytes: int


def _reason(plan: ExecutionPlan, run: Run) -> Reason:
    first = run.operators[0]
    kinds = list(dict.fromkeys(first.slices))
    text = _pinned_text(run) or _choice_text(plan, run)
    return Reason(
        operators=(run.pattern or "(the module itself)",),
        mode=" + ".join(kinds) + (", recomputed" if first.checkpoint else ""),
        count=len(run.operators),
        num_parameters=run.num_parameters,
        text=text,
    )


def _pinned_text(run: Run) -> str:
    """Why there was nothing to choose; empty if there was, or if the plan does not say."""
    first = run.operators[0]
    if first.pinned:
        same = all(operator.pinned == first.pinned for operator in run.operators)
        return f"Stays replicated: {first.pinned if same else f'{first.name}: {first.pinned}'}."
    if len(first.alternatives) == 1:
        return "Stays replicated: its parameters are too small to be worth collectives of their own."
    return ""


def _choice_text(plan: ExecutionPlan, run: Run) -> str:
    others = _exchanges(plan, run)
    if not others:
        return "The plan does not say why."
    price = plan.price_s_per_byte or 0.0
    # The next best is the one that loses least, memory counted at its price.
    best = min(others, key=lambda other: other.time_s + price * other.bytes)
    number = len(run.operators)
    together = f", for {'both' if number == 2 else f'all {number}'} together," if number > 1 else ""
    room = plan.memory_limit_bytes - plan.predicted.peak_memory_bytes
    trade = _trade(best, price, room)
    return f"{_role(run)}. Next best{together} is {best.mode} ({MODE_WORDS[best.mode]}): it would {trade}."


def _role(run: Run) -> str:
    """``The fastest mode``, ``The smallest mode``, or neither."""
    mode = run.operators[0].slices[0]
    costs = {cost.mode: cost for cost in run.operators[0].alternatives}
    if costs[mode].time_s <= min(cost.time_s for cost in costs.values()):
        return "Its fastest mode"
    if costs[mode].resident_bytes <= min(cost.resident_bytes for cost in costs.values()):
        return "Its smallest mode"
    return "Neither its fastest nor its smallest mode"


def _trade(other: _Exchange, price: float, room_bytes: int) -> str:
    """What an exchange would bring and cost, and whether that pays."""
    time, memory = format_seconds(abs(other.time_s)), format_bytes(abs(other.bytes))
    worth, rate = price * abs(other.bytes), f"{format_seconds(price * (1 << 20))} per MiB"
    under = f"at the price of memory under this limit ({rate})"
    whole = f"by the price of memory alone ({rate}) that would pay, but {_WHOLE}"
    if other.time_s >= 0 and other.bytes > -_NOTHING_BYTES:
        more = f" (take {memory} more)" if other.bytes >= _NOTHING_BYTES else ""
        return f"cost {time} a step more and free no memory{more}"
    if other.time_s >= 0:
        start = f"free {memory} but cost {time} a step"
        if not price:
            return f"{start}, and memory is not scarce"
        return f"{start}; " + (f"{under} that does not pay" if worth <= other.time_s * (1 + _CLOSE) else whole)
    if other.bytes <= 0:
        return f"save {time} a step, but no plan with it was found to fit at its peak"
    start = f"save {time} a step but take {memory} more"
    if worth > -other.time_s * (1 + _CLOSE):
        return f"{start}; {under} those bytes save more elsewhere"
    return f"{start}, and {format_bytes(room_bytes)} are left" if other.bytes > room_bytes else f"{start}; {whole}"


_WHOLE = "operators change as a whole and no exchange of whole ones gains"

_NOTHING_BYTES = 1 << 10
"""Less than this is rounding of shards to whole elements."""

_CLOSE = 1e-3
"""Relative: worths and costs this close are equal, as they are for the operator that sets the price."""


def _exchanges(plan: ExecutionPlan, run: Run) -> list[_Exchange]:
    """What each other mode would change if all of the run took it; empty if the plan does not say."""
    first = run.operators[0]
    if not all(operator.alternatives for operator in run.operators) or len(set(first.slices)) > 1:
        return []
    members = {operator.name for operator in run.operators}
    beside = max((cost.transient_bytes for cost in _chosen(plan.operators, members)), default=0)

    def cost(mode: Mode) -> tuple[float, int]:
        costs = [alternative for op in run.operators for alternative in op.alternatives if alternative.mode == mode]
        largest = max(beside, *(one.transient_bytes for one in costs), 0)
        return sum(one.time_s for one in costs), sum(one.resident_bytes for one in costs) + largest

    time_s, size = cost(first.slices[0])
    modes = [alternative.mode for alternative in first.alternatives if alternative.mode != first.slices[0]]
    return [_Exchange(mode, cost(mode)[0] - time_s, cost(mode)[1] - size) for mode in modes]


def _chosen(operators: Iterable[OperatorPlan], without: set[str]) -> list[ModeCost]:
    """The costs of the modes that the other operators have."""
    return [
        cost
        for operator in operators
        if operator.name not in without
        for cost in operator.alternatives
        if cost.mode == operator.slices[0]
    ]


def _joined(reasons: Sequence[tuple[Run, Reason]]) -> list[Reason]:
    """Reasons of the same text and mode as one, but not where the text counts a run's operators together."""
    groups: dict[tuple[str, ...], list[Reason]] = {}
    for run, reason in reasons:
        counted = len(run.operators) > 1 and not _pinned_text(run)
        groups.setdefault((reason.mode, reason.text, *(reason.operators if counted else ())), []).append(reason)
    return [
        Reason(
            operators=tuple(name for reason in group for name in reason.operators),
            mode=group[0].mode,
            count=sum(reason.count for reason in group),
            num_parameters=sum(reason.num_parameters for reason in group),
            text=group[0].text,
        )
        for group in groups.values()
    ]


# -- differences -------------------------------------------------------------------------------------------------------


def _problem_changes(a: ExecutionPlan, b: ExecutionPlan) -> list[Change]:
    changes = [
        Change(what="model", before=a.model.fingerprint[:12], after=b.model.fingerprint[:12]),
        _number("parameters", a.model.num_parameters, b.model.num_parameters, format_count),
        _number("nodes", a.cluster.nodes, b.cluster.nodes),
        _number("devices per node", a.cluster.devices_per_node, b.cluster.devices_per_node),
        Change(what="device", before=a.cluster.device, after=b.cluster.device),
        Change(what="backend", before=a.cluster.backend, after=b.cluster.backend),
        _number("memory limit", a.memory_limit_bytes, b.memory_limit_bytes, format_bytes),
    ]
    for name in type(a.cluster.link).model_fields:
        before, after = getattr(a.cluster.link, name), getattr(b.cluster.link, name)
        what = name.replace("_", "-")
        changes.append(_number(f"{what} latency", before.latency_s, after.latency_s, format_seconds))
        changes.append(_number(f"{what} time per MiB", before.s_per_byte, after.s_per_byte, _per_mib))
    return changes


def _per_mib(s_per_byte: float) -> str:
    return format_seconds(s_per_byte * (1 << 20))


def _prediction_changes(a: Prediction, b: Prediction) -> list[Change]:
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("step time", "step_time_s", format_seconds),
        ("compute", "compute_time_s", format_seconds),
        ("communication", "communication_time_s", format_seconds),
        ("throughput", "samples_per_s", lambda value: f"{value:,.1f} samples/s"),
        ("peak memory", "peak_memory_bytes", format_bytes),
        ("memory before the model", "overhead_bytes", format_bytes),
    ]
    return [_number(what, getattr(a, field), getattr(b, field), write) for what, field, write in rows]


def _mode_changes(a: Sequence[OperatorPlan], b: Sequence[OperatorPlan]) -> tuple[Change, ...]:
    """Operators whose mode differs or that only one plan has, joined where both sides of neighbours agree."""
    before, after = ({operator.name: _mode_words(operator) for operator in side} for side in (a, b))
    everyone = {operator.name: operator for operator in (*a, *b)}
    by_change: dict[tuple[str, str], list[OperatorPlan]] = {}
    for name, operator in everyone.items():
        change = (before.get(name, ""), after.get(name, ""))
        if change[0] != change[1]:
            plain = OperatorPlan(name=name, slices=(Mode.DP,), num_parameters=operator.num_parameters)
            by_change.setdefault(change, []).append(plain)
    return tuple(
        Change(what=run.pattern or "(the module itself)", before=old, after=new)
        for (old, new), operators in by_change.items()
        for run in group_runs(operators)
    )


def _mode_words(operator: OperatorPlan) -> str:
    return " + ".join(operator.slices) + (", recomputed" if operator.checkpoint else "")


def _number(what: str, before: float, after: float, write: Callable[..., str] = str) -> Change:
    relative = (after - before) / before if before and before != after else None
    old, new = write(before), write(after)
    if old == new and before != after:  # a difference that rounding hides
        old, new = str(before), str(after)
    return Change(what=what, before=old, after=new, relative=relative)


def _changed(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.before != change.after)


def _change_line(change: Change) -> str:
    relative = f" ({change.relative:+.1%})" if change.relative is not None else ""
    return f"{change.what}: {change.before or 'not there'} -> {change.after or 'not there'}{relative}"
