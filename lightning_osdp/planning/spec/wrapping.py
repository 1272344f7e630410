"""Operators of a block that share one unit: gathered by one collective, as FSDP around each block does it.

That saves latencies, and a whole gather where the block is recomputed (``cost``); the price is a larger transient. For
the search a joined block is one operator with the parameters of all: its choices are those of an operator that can't
be split. Blocks that are alike are joined all or none, so there are few ways to try (``wrap_assignments``); what such a plan keeps
replicated has no unit to share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, legal_modes
from lightning_osdp.planning.spec.cluster import ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, ModelProfile, Operator, RepeatedBlock

MAX_BLOCK_KINDS = 2
"""Kinds of blocks that are joined or not independently of each other; where there are more, all of them or none."""

WrapAssignment = tuple[str, ...]
"""Of each operator, the block whose unit it shares; empty if it has its own."""


def wrap_assignments(model: ModelProfile, constraints: SearchConstraints) -> list[WrapAssignment]:
    """Which operators may share units, none first."""
    kinds: dict[tuple[object, ...], list[RepeatedBlock]] = {}
    for block in model.blocks if constraints.capabilities.per_block_wrap else ():
        members = _wrappable_operators(model, block, constraints)
        if len(members) > 1:
            signatures = tuple(model.operators[index].signature for index in members)
            kinds.setdefault((block.kind, signatures), []).append(block)
    families = list(kinds.values())
    sizes = range(1, len(families) + 1) if len(families) <= MAX_BLOCK_KINDS else [len(families)]
    chosen = chain.from_iterable(combinations(families, size) for size in sizes)
    joined = ([block for family in families for block in family] for families in chosen)
    return [("",) * len(model.operators), *(_assign_blocks(model, blocks, constraints) for blocks in joined)]


def _assign_blocks(
    model: ModelProfile, blocks: Iterable[RepeatedBlock], constraints: SearchConstraints
) -> WrapAssignment:
    names = {index: block.name for block in blocks for index in _wrappable_operators(model, block, constraints)}
    return tuple(names.get(index, "") for index in range(len(model.operators)))


def _wrappable_operators(model: ModelProfile, block: RepeatedBlock, constraints: SearchConstraints) -> list[int]:
    """Those that may share the block's unit.

    What is not trained would stay gathered to the end of the backward pass, and a unit holds one type.
    """
    if block.recompute_blocker:
        return []
    found = [index for index in block.operators if _can_wrap(model.operators[index], constraints)]
    sizes = {p.element_bytes for index in found for p in model.operators[index].shardable_parameters}
    return found if len(sizes) == 1 else []


def _can_wrap(operator: Operator, constraints: SearchConstraints) -> bool:
    whole = 1 in (constraints.allowed_slices(operator.name) or (1,))
    return whole and Mode.ZDP in legal_modes(operator) and all(p.trainable for p in operator.shardable_parameters)


@dataclass(frozen=True)
class WrappedModel:
    """A model in which operators that share a unit are one.

    Attributes:
        model: the same, with fewer operators.
        wrapped_index: of each operator as it was, which one of ``model`` it has become (part of).
    """

    model: ModelProfile
    wrapped_index: tuple[int, ...]

    @classmethod
    def from_assignment(cls, model: ModelProfile, assignment: Sequence[str]) -> WrappedModel:
        """
        Args:
            model: as it was traced.
            assignment: as ``WrapAssignment``.
        """
        if not any(assignment):
            return cls(model, tuple(range(len(model.operators))))
        operators: list[list[int]] = []
        known: dict[str, int] = {}
        place = []
        for index, unit in enumerate(assignment):
            at = known.get(unit, len(operators)) if unit else len(operators)
            if at == len(operators):
                operators.append([])
                known |= {unit: at}
            operators[at].append(index)
            place.append(at)
        kinds = {block.name: block.kind for block in model.blocks}
        merged = tuple(
            _merge_operators(assignment[members[0]], kinds, [model.operators[index] for index in members])
            for members in operators
        )
        moved = {UNATTRIBUTED: UNATTRIBUTED, **dict(enumerate(place))}
        moments, evaluation = (
            tuple(one.model_copy(update={"operator": moved[one.operator]}) for one in each)
            for each in (model.moments, model.evaluation)
        )
        blocks = tuple(
            one.model_copy(update={"operators": tuple(dict.fromkeys(place[index] for index in one.operators))})
            for one in model.blocks
        )
        changes = {"operators": merged, "moments": moments, "evaluation": evaluation, "blocks": blocks}
        return cls(model.model_copy(update=changes), tuple(place))

    def merge_times(self, compute: ComputeTimes) -> ComputeTimes:
        """Those of what has been joined, together."""
        together: list[list[OperatorTime]] = [[] for _ in self.model.operators]
        for at, time in zip(self.wrapped_index, compute.operators, strict=True):
            together[at].append(time)
        return compute.model_copy(update={"operators": tuple(map(_sum_times, together))})

    def merge_choices(self, choices: Sequence[ShardingChoice]) -> tuple[ShardingChoice, ...]:
        """One choice for each operator of ``model``, from those of the operators as they were."""
        first = dict(zip(reversed(self.wrapped_index), reversed(choices), strict=True))
        return tuple(first[at] for at in range(len(self.model.operators)))

    def expand_choices(self, choices: Sequence[ShardingChoice]) -> tuple[ShardingChoice, ...]:
        """The other way round: a joined operator's choice is that of all its members."""
        return tuple(choices[at] for at in self.wrapped_index)


def _merge_operators(unit: str, kinds: dict[str, str], members: list[Operator]) -> Operator:
    if not unit:
        return members[0]
    parameters = [p for member in members for p in member.parameters]
    backwards = reversed(range(len(parameters)))  # gradients come one after the other, the last one's first
    return Operator(
        name=unit,
        kind=kinds.get(unit, unit),
        parameters=tuple(
            p.model_copy(update={"gradient_order": turn}) for p, turn in zip(parameters, backwards, strict=True)
        ),
        flops_per_sample=sum(member.flops_per_sample for member in members),
        unsplittable_reason="it shares a unit with its neighbours",
        num_wrapped=len(members),
    )


def _sum_times(times: list[OperatorTime]) -> OperatorTime:
    if len(times) == 1:
        return times[0]

    def sum_lines(line_of: Callable[[OperatorTime], LinearInBatch]) -> LinearInBatch:
        lines = [line_of(time) for time in times]
        return LinearInBatch(fixed=sum(line.fixed for line in lines), per_sample=sum(line.per_sample for line in lines))

    return OperatorTime(forward=sum_lines(lambda time: time.forward), backward=sum_lines(lambda time: time.backward))
