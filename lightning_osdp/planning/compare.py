"""How two plans differ, in words and as values. Reads nothing but plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_osdp.planning.choices import Mode
from lightning_osdp.planning.operators import Frozen
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan, Prediction
from lightning_osdp.planning.runs import group_runs, operator_words
from lightning_osdp.planning.units import format_bytes, format_count, format_seconds


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


def diff(a: ExecutionPlan, b: ExecutionPlan) -> str:
    """What differs from ``a`` to ``b``, one line each; ``no difference`` if they decide and predict the same."""
    return difference(a, b).to_text()


def difference(a: ExecutionPlan, b: ExecutionPlan) -> Difference:
    """``diff`` as a value, for JSON."""
    decision = [
        _number("batch size", a.batch_size, b.batch_size),
        _number("accumulated batches", a.accumulate_grad_batches, b.accumulate_grad_batches),
        _number("global batch size", a.global_batch_size, b.global_batch_size),
        Change(what="sharded parameters are updated", before=_when_updated(a), after=_when_updated(b)),
        Change(what="freed tensors", before=_where_freed(a), after=_where_freed(b)),
        _number("units run ahead up to", a.cluster.ahead_bytes, b.cluster.ahead_bytes, format_bytes),
    ]
    return Difference(
        problem=_changed(_problem_changes(a, b)),
        decision=_changed(decision) + _mode_changes(a.operators, b.operators),
        prediction=_changed(_prediction_changes(a.predicted, b.predicted)),
    )


def _when_updated(plan: ExecutionPlan) -> str:
    return "in the backward pass" if plan.update_in_backward else "after it"


def _where_freed(plan: ExecutionPlan) -> str:
    return "stay in the heap" if plan.keep_heap else "are handed back to the system"


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
    before, after = ({operator.name: operator_words(operator) for operator in side} for side in (a, b))
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
