"""Compare two plans, in words and as values. Reads nothing but plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lightning_osdp.errors import check_kind
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.formatting import format_bytes, format_count, format_seconds
from lightning_osdp.planning.spec.frozen import FrozenModel
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan, Prediction
from lightning_osdp.report.operator_runs import describe_operator_choice, group_runs


class Change(FrozenModel):
    """One difference as text; ``before`` or ``after`` is empty where one plan has no such thing.

    ``relative`` is (after - before) / before, where both are numbers and ``before`` is not 0.
    """

    what: str
    before: str
    after: str
    relative: float | None = None


class Difference(FrozenModel):
    """All differences between two plans; empty if they decide and predict the same.

    Attributes:
        problem: model, hardware and memory limit that the plans were made for.
        decision: batch size, accumulation, and modes by runs of operators.
        prediction: step time, throughput and memory.
    """

    problem: tuple[Change, ...]
    decision: tuple[Change, ...]
    prediction: tuple[Change, ...]

    @property
    def changes(self) -> tuple[Change, ...]:
        """The differences of all three kinds."""
        return self.problem + self.decision + self.prediction

    def to_text(self) -> str:
        """Format one line for each change: ``WHAT: BEFORE -> AFTER (+1.0%)``."""
        if not self.changes:
            return "no difference"
        return "\n".join(_format_change(change) for change in self.changes)


def diff(a: ExecutionPlan, b: ExecutionPlan) -> str:
    """Describe how plan ``b`` differs from plan ``a``, one line for each change, or return ``no difference``."""
    return build_difference(a, b).to_text()


def build_difference(a: ExecutionPlan, b: ExecutionPlan) -> Difference:
    """Compare two plans and return the differences as a value that can be written as JSON."""
    for plan in (a, b):
        check_kind("diff()", plan, ExecutionPlan, "two ExecutionPlans")
    decision = [
        _numeric_change("batch size", a.batch_size, b.batch_size),
        _numeric_change("accumulated batches", a.accumulate_grad_batches, b.accumulate_grad_batches),
        _numeric_change("global batch size", a.global_batch_size, b.global_batch_size),
        Change(what="sharded parameters are updated", before=_update_time_text(a), after=_update_time_text(b)),
        Change(what="freed tensors", before=_freed_tensors_text(a), after=_freed_tensors_text(b)),
        _numeric_change(
            "prefetched units up to", a.cluster.prefetch_max_bytes, b.cluster.prefetch_max_bytes, format_bytes
        ),
    ]
    return Difference(
        problem=_drop_unchanged(_problem_changes(a, b)),
        decision=_drop_unchanged(decision) + _mode_changes(a.operators, b.operators),
        prediction=_drop_unchanged(_prediction_changes(a.predicted, b.predicted)),
    )


def _update_time_text(plan: ExecutionPlan) -> str:
    return "in the backward pass" if plan.update_in_backward else "after it"


def _freed_tensors_text(plan: ExecutionPlan) -> str:
    return "stay in the heap" if plan.retain_freed_memory else "are handed back to the system"


def _problem_changes(a: ExecutionPlan, b: ExecutionPlan) -> list[Change]:
    changes = [
        Change(what="model", before=a.model.fingerprint[:12], after=b.model.fingerprint[:12]),
        _numeric_change("parameters", a.model.num_parameters, b.model.num_parameters, format_count),
        _numeric_change("nodes", a.cluster.nodes, b.cluster.nodes),
        _numeric_change("devices per node", a.cluster.devices_per_node, b.cluster.devices_per_node),
        Change(what="device", before=a.cluster.device, after=b.cluster.device),
        Change(what="backend", before=a.cluster.backend, after=b.cluster.backend),
        _numeric_change("memory limit", a.memory_limit_bytes, b.memory_limit_bytes, format_bytes),
    ]
    for name in type(a.cluster.link).model_fields:
        before, after = getattr(a.cluster.link, name), getattr(b.cluster.link, name)
        what = name.replace("_", "-")
        changes.append(_numeric_change(f"{what} latency", before.latency_s, after.latency_s, format_seconds))
        per_mib = before.s_per_byte * (1 << 20), after.s_per_byte * (1 << 20)
        changes.append(_numeric_change(f"{what} time per MiB", *per_mib, format_seconds))
    return changes


def _prediction_changes(a: Prediction, b: Prediction) -> list[Change]:
    rows: list[tuple[str, str, Callable[[float], str]]] = [
        ("step time", "step_time_s", format_seconds),
        ("compute", "compute_time_s", format_seconds),
        ("communication", "communication_time_s", format_seconds),
        ("throughput", "samples_per_s", lambda value: f"{value:,.1f} samples/s"),
        ("peak memory", "peak_memory_bytes", format_bytes),
        ("memory before the model", "overhead_bytes", format_bytes),
    ]
    return [_numeric_change(what, getattr(a, field), getattr(b, field), write) for what, field, write in rows]


def _mode_changes(a: Sequence[OperatorPlan], b: Sequence[OperatorPlan]) -> tuple[Change, ...]:
    """Return the operators whose mode differs or that only one plan has, neighbours with the same change as one run."""
    before, after = ({operator.name: describe_operator_choice(operator) for operator in side} for side in (a, b))
    everyone = {operator.name: operator for operator in (*a, *b)}
    by_change: dict[tuple[str, str], list[OperatorPlan]] = {}
    for name, operator in everyone.items():
        change = (before.get(name, ""), after.get(name, ""))
        if change[0] != change[1]:
            plain = OperatorPlan(name=name, slices=(Mode.DP,), num_parameters=operator.num_parameters)
            by_change.setdefault(change, []).append(plain)
    return tuple(
        Change(what=run.label, before=old, after=new)
        for (old, new), operators in by_change.items()
        for run in group_runs(operators)
    )


def _numeric_change(what: str, before: float, after: float, format_value: Callable[..., str] = str) -> Change:
    relative = (after - before) / before if before and before != after else None
    old, new = format_value(before), format_value(after)
    if old == new and before != after:  # rounding hides the difference
        old, new = str(before), str(after)
    return Change(what=what, before=old, after=new, relative=relative)


def _drop_unchanged(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(change for change in changes if change.before != change.after)


def _format_change(change: Change) -> str:
    relative = f" ({change.relative:+.1%})" if change.relative is not None else ""
    return f"{change.what}: {change.before or 'not there'} -> {change.after or 'not there'}{relative}"
