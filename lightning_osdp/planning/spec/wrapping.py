"""Shared units: operators of a block that are gathered by one collective, as FSDP around each block does it.

A shared unit saves latencies, and a whole gather if the block is recomputed; its price is a larger transient. For the
search, a wrapped block is one operator with the parameters of all its members, which can't be split. Equal blocks are
wrapped all or none, so there are few assignments to try. Operators that a plan replicates have no unit to share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain, combinations

from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, ModelProfile, Operator, RepeatedBlock

MAX_BLOCK_KINDS = 2
"""Up to this many kinds of blocks are wrapped independently of each other; of more kinds, all of them or none."""

WrapAssignment = tuple[str, ...]
"""For each operator, the block whose unit it shares; empty if it has its own unit."""


def wrap_assignments(model: ModelProfile, constraints: SearchConstraints) -> list[WrapAssignment]:
    """Return the ways to let operators share units, the one without shared units first."""
    kinds: dict[tuple[object, ...], dict[int, str]] = {}
    for block in model.blocks if constraints.capabilities.per_block_wrap else ():
        members = _wrappable_operators(model, block, constraints)
        if len(members) > 1:
            signatures = tuple(model.operators[index].sharding_signature for index in members)
            kinds.setdefault((block.kind, signatures), {}).update(dict.fromkeys(members, block.name))
    units = list(kinds.values())
    counts = range(1, len(units) + 1) if len(units) <= MAX_BLOCK_KINDS else [len(units)]
    chosen = chain.from_iterable(combinations(units, count) for count in counts)
    merged = [{}, *({index: name for unit in choice for index, name in unit.items()} for choice in chosen)]
    return [tuple(names.get(index, "") for index in range(len(model.operators))) for names in merged]


def _wrappable_operators(model: ModelProfile, block: RepeatedBlock, constraints: SearchConstraints) -> list[int]:
    if block.recompute_blocker:
        return []
    members = [index for index in block.operators if _can_wrap(model.operators[index], constraints)]
    if len({constraints.forced_mode(model.operators[index]) for index in members} - {None}) > 1:
        return []  # a unit has one mode
    element_sizes = {p.element_bytes for index in members for p in model.operators[index].shardable_parameters}
    return members if len(element_sizes) == 1 else []  # a unit holds one type


def _can_wrap(operator: Operator, constraints: SearchConstraints) -> bool:
    # Frozen parameters would stay gathered until the backward pass ends.
    trainable = all(p.trainable for p in operator.shardable_parameters)
    may_be_unsplit = 1 in (constraints.allowed_slices(operator.name) or (1,))
    if constraints.forced_mode(operator) in (Mode.DP, Mode.TP):
        return False
    can_shard = Mode.ZDP in legal_modes(operator) and Mode.ZDP in constraints.capabilities.modes
    return may_be_unsplit and trainable and can_shard


@dataclass(frozen=True)
class WrappedModel:
    """A model in which operators that share a unit are one operator.

    Attributes:
        model: The same model with fewer operators.
        wrapped_index: For each original operator, its index in ``model``.
    """

    model: ModelProfile
    wrapped_index: tuple[int, ...]

    @classmethod
    def from_assignment(cls, model: ModelProfile, assignment: Sequence[str]) -> WrappedModel:
        """Merge the operators of ``model`` that share a unit according to a ``WrapAssignment``."""
        if not any(assignment):
            return cls(model, tuple(range(len(model.operators))))
        members: dict[object, list[int]] = {}
        for index, unit in enumerate(assignment):
            members.setdefault(unit or index, []).append(index)
        new_index = {old: new for new, olds in enumerate(members.values()) for old in olds}
        kinds = {block.name: block.kind for block in model.blocks}
        operators = tuple(
            _merge_operators(assignment[olds[0]], kinds, [model.operators[old] for old in olds])
            for olds in members.values()
        )
        later = {old: _later_quarters(rank, len(olds)) for olds in members.values() for rank, old in enumerate(olds)}
        moments, evaluation = (
            tuple(
                m.model_copy(
                    update={
                        "operator": new_index.get(m.operator, UNATTRIBUTED),
                        "later_quarters": later.get(m.operator, 0),
                        "within": tuple(new_index[operator] for operator in m.within),
                    }
                )
                for m in sequence
            )
            for sequence in (model.moments, model.evaluation)
        )
        blocks = tuple(
            block.model_copy(update={"operators": tuple(dict.fromkeys(new_index[old] for old in block.operators))})
            for block in model.blocks
        )
        changes = {"operators": operators, "moments": moments, "evaluation": evaluation, "blocks": blocks}
        return cls(model.model_copy(update=changes), tuple(new_index[old] for old in range(len(model.operators))))

    def merge_times(self, compute: ComputeTimes) -> ComputeTimes:
        """Return the compute times of ``model``, given those of the original operators."""
        members: list[list[OperatorTime]] = [[] for _ in self.model.operators]
        for index, time in zip(self.wrapped_index, compute.operators, strict=True):
            members[index].append(time)
        return compute.model_copy(update={"operators": tuple(map(_sum_times, members))})

    def merge_choices(self, choices: Sequence[ShardingChoice]) -> tuple[ShardingChoice, ...]:
        """Return the choices for ``model``, given those of the original operators."""
        first = dict(zip(reversed(self.wrapped_index), reversed(choices), strict=True))
        return tuple(first[index] for index in range(len(self.model.operators)))

    def merge_modes(self, modes: Iterable[Mode | None]) -> tuple[Mode | None, ...]:
        """Return the forced modes of ``model``'s operators, given those of the original ones; None is any mode."""
        forced = {new: mode for new, mode in zip(self.wrapped_index, modes, strict=True) if mode is not None}
        return tuple(map(forced.get, range(len(self.model.operators))))

    def expand_choices(self, choices: Sequence[ShardingChoice]) -> tuple[ShardingChoice, ...]:
        """Return the choices for the original operators, given those for ``model``."""
        return tuple(choices[index] for index in self.wrapped_index)


def _later_quarters(rank: int, count: int) -> int:
    """Return how many quarters of ``count`` operators run backward after the one that is number ``rank`` forward."""
    return 4 * rank // count


def _merge_operators(unit: str, kinds: dict[str, str], members: list[Operator]) -> Operator:
    if not unit:
        return members[0]
    parameters = [
        p.model_copy(update={"later_quarters": _later_quarters(rank, len(members))})
        for rank, member in enumerate(members)
        for p in member.parameters
    ]
    # Gradients appear one after the other, the last parameter's first.
    orders = reversed(range(len(parameters)))
    return Operator(
        name=unit,
        kind=kinds.get(unit, unit),
        parameters=tuple(
            p.model_copy(update={"gradient_order": order}) for p, order in zip(parameters, orders, strict=True)
        ),
        flops_per_sample=sum(member.flops_per_sample for member in members),
        unsplittable_reason="it shares a unit with its neighbours",
        num_wrapped=len(members),
    )


def _sum_times(times: list[OperatorTime]) -> OperatorTime:
    if len(times) == 1:
        return times[0]

    def add(line_of: Callable[[OperatorTime], LinearInBatch]) -> LinearInBatch:
        return reduce(LinearInBatch.plus, map(line_of, times))

    return OperatorTime(forward=add(lambda time: time.forward), backward=add(lambda time: time.backward))
