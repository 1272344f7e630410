"""Operators of repeated blocks joined into runs: ``blocks.0.qkv`` to ``blocks.7.qkv`` are ``blocks.0-7.qkv``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_osdp.planning.spec.choices import ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.plan import OperatorPlan


@dataclass(frozen=True)
class OperatorRun:
    """Operators whose names differ only in one integer component, counting up by one, with the same choice."""

    pattern: str
    """Their common name, with a range for the integer: ``blocks.0-7.attn.qkv``."""
    operators: tuple[OperatorPlan, ...]

    @property
    def num_parameters(self) -> int:
        """Of all of them together."""
        return sum(op.num_parameters for op in self.operators)


def describe_operator_choice(operator: OperatorPlan) -> str:
    """``describe_choice``, whether it shares a unit with the rest of its block, and whether that is recomputed."""
    notes = [", joined"] * bool(operator.unit) + [", recomputed"] * operator.is_recomputed
    return describe_choice(operator.choice) + "".join(notes)


def describe_choice(choice: ShardingChoice) -> str:
    """``zdp``, ``zdp x 4`` in four slices, ``zdp x 3 + dp x 1``, ``zdp in node``, ``zdp in two stages``."""
    counts = Counter(choice.slices)
    words = [f"{mode.value} x {count}" if len(choice.slices) > 1 else mode.value for mode, count in counts.items()]
    where = " in node" if choice.scope == ShardingScope.NODE else " in two stages" if choice.hierarchical else ""
    return " + ".join(words) + where


def group_runs(operators: Iterable[OperatorPlan]) -> list[OperatorRun]:
    """Operators joined into runs, in the order of each run's first operator.

    Repeated blocks interleave their operators (``0.qkv, 0.mlp, 1.qkv, ...``), so a run stays open while others grow.
    A run counts along the integer in which its second operator differs from its first.
    """
    runs: list[list[OperatorPlan]] = []
    awaited: dict[tuple[object, ...], int] = {}
    for operator in operators:
        keys = _run_keys(operator)
        found = next(((key, awaited[key]) for key in keys if key in awaited), None)
        if found is None:
            runs.append([operator])
            awaited.update((_next_key(key), len(runs) - 1) for key in keys)
            continue
        key, index = found
        runs[index].append(operator)
        awaited = {other: run for other, run in awaited.items() if run != index} | {_next_key(key): index}
    return [OperatorRun(_common_pattern([op.name for op in run]), tuple(run)) for run in runs]


def _run_keys(operator: OperatorPlan) -> list[tuple[object, ...]]:
    """One key for each integer in the name: (what is before it, what is after it, the choice, the integer)."""
    parts = operator.name.split(".")
    return [
        (
            tuple(parts[:position]),
            tuple(parts[position + 1 :]),
            operator.choice,
            bool(operator.unit),
            operator.is_recomputed,
            operator.replicated_reason,
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
    """The names of a run as one: ``a.0.b, a.1.b, a.2.b`` is ``a.0-2.b``."""
    first, last = names[0].split("."), names[-1].split(".")
    return ".".join(a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))
