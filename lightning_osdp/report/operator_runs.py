"""Group the operators of repeated blocks: ``blocks.0.qkv`` to ``blocks.7.qkv`` are ``blocks.0-7.qkv``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.formatting import format_seconds
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan

MODE_DESCRIPTIONS = {
    Mode.DP: "replicated",
    Mode.ZDP2: "sharded, gathered once a step",
    Mode.ZDP: "sharded, gathered twice a step",
    Mode.TP: "cut, activations exchanged instead of weights",
}


@dataclass(frozen=True)
class OperatorRun:
    """Operators with the same choice whose names differ in one integer that counts up by one.

    Attributes:
        pattern: their common name with a range for the integer, ``blocks.0-7.attn.qkv``.
        operators: in order.
    """

    pattern: str
    operators: tuple[OperatorPlan, ...]

    @property
    def label(self) -> str:
        """The pattern, or words where the operator is the module itself."""
        return self.pattern or "(the module itself)"

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all operators together."""
        return sum(op.num_parameters for op in self.operators)


def describe_operator_choice(operator: OperatorPlan) -> str:
    """Describe a choice, whether its block is wrapped as one unit (per block), and whether the block is recomputed."""
    notes = [", per block"] * bool(operator.unit) + [", recomputed"] * operator.is_recomputed
    return describe_choice(operator.choice) + "".join(notes)


def describe_choice(choice: ShardingChoice) -> str:
    """Describe a choice, such as ``zdp``, ``zdp x 4`` (four slices), ``zdp x 3 + dp x 1``, ``zdp in node``."""
    counts = Counter(choice.slices)
    words = [f"{mode.value} x {count}" if len(choice.slices) > 1 else mode.value for mode, count in counts.items()]
    if choice.tensor_degree > 1:
        words = [f"{word} over {choice.tensor_degree} ranks" for word in words]
    where = " in node" if choice.scope == ShardingScope.NODE else " hierarchical" if choice.hierarchical else ""
    return " + ".join(words) + where


def group_runs(operators: Iterable[OperatorPlan]) -> list[OperatorRun]:
    """Group operators into runs, in the order of each run's first operator.

    Repeated blocks interleave their operators (``0.qkv, 0.mlp, 1.qkv, ...``), so a run stays open while others grow.
    A run counts along the integer in which its second operator differs from its first.
    """
    runs: list[list[OperatorPlan]] = []
    run_by_next_key: dict[tuple[object, ...], int] = {}
    for operator in operators:
        keys = _run_keys(operator)
        match = next(((key, run_by_next_key[key]) for key in keys if key in run_by_next_key), None)
        if match is None:
            runs.append([operator])
            run_by_next_key.update((_next_key(key), len(runs) - 1) for key in keys)
            continue
        key, index = match
        runs[index].append(operator)
        run_by_next_key = {k: run for k, run in run_by_next_key.items() if run != index} | {_next_key(key): index}
    return [OperatorRun(_common_pattern([op.name for op in run]), tuple(run)) for run in runs]


def _run_keys(operator: OperatorPlan) -> list[tuple[object, ...]]:
    """Return one key for each integer in the name: (parts before it, parts after it, the choice, the integer)."""
    parts = operator.name.split(".")
    return [
        (
            tuple(parts[:position]),
            tuple(parts[position + 1 :]),
            operator.choice,
            bool(operator.unit),
            operator.is_recomputed,
            operator.replicated_reason,
            operator.requested_mode,
            int(part),
        )
        for position, part in enumerate(parts)
        if part.isdecimal()
    ]


def _next_key(key: tuple[object, ...]) -> tuple[object, ...]:
    *rest, integer = key
    assert isinstance(integer, int)
    return (*rest, integer + 1)


def _common_pattern(names: Sequence[str]) -> str:
    first, last = names[0].split("."), names[-1].split(".")
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))


def describe_tried(plan: ExecutionPlan) -> str:
    """Return what each of the plans took that were tried: ``all replicated 258 ms, this plan 241 ms``."""
    texts = []
    for one in sorted(plan.tried, key=lambda one: one.is_chosen):
        name = one.name if not one.is_chosen else "this plan"
        modes = {mode for operator in plan.operators for mode in operator.slices}
        if one.is_chosen and (Mode.TP in modes or modes <= {Mode.DP}):
            name = f"this plan ({one.name})"
        size = f" at batch size {one.batch_size}" if one.batch_size != plan.batch_size else ""
        texts.append(f"{name} {format_seconds(one.step_time_s)}{size}")
    return ", ".join(texts)
