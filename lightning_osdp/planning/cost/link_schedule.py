"""The time that a rank waits for its link in a step, by playing the collectives of a whole plan in order (CPU).

``step_time.hidden_s`` gives each operator the compute of its neighbours, whatever is chosen for these, because an exact
search needs costs that add up. A plan that was found is known as a whole, so that each collective can be started when
the engine starts it (``engine.fairscale.unit_collectives``): two units are gathered ahead, one reduction goes on while
the next gradient is computed, and all share the link inside their node, or that between nodes, or both. So a unit
behind one in slices is gathered beside the last two of them alone, and a reduction waits for the all-reduce of a large
table that came before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lightning_osdp.planning.cost.neighbours import forward_order, with_work_between
from lightning_osdp.planning.cost.sharding_scopes import PREFETCHED_UNITS, ScopeLinks, scope_links
from lightning_osdp.planning.cost.shards import OperatorShards, ShardUnit, shards_of
from lightning_osdp.planning.cost.step_time import (
    all_reduces_s,
    exchange_time,
    forward_backward_time,
    inter_node_s,
    tensor_all_reduces_s,
    unit_communication,
)
from lightning_osdp.planning.spec.choices import ShardingChoice
from lightning_osdp.planning.spec.cluster import Cluster, ComputeTimes, OperatorTime
from lightning_osdp.planning.spec.model import ModelProfile, Operator


class _Collective(NamedTuple):
    """A gather or reduction of a unit."""

    seconds: float
    """On the link."""
    is_async: bool = True
    """Whether the rank computes meanwhile."""
    spans_nodes: bool = True
    """Whether it occupies the link between nodes, too, if there are several."""


class _Stretch(NamedTuple):
    """What a rank computes for one unit or replicated part, with what comes before and after."""

    compute_s: float
    gather: _Collective | None = None
    reductions: tuple[_Collective, ...] = ()
    """Of the unit's gradients, which come one after the other while it computes."""
    all_reduce_s: float = 0.0
    """Of its replicated gradients, once per step."""
    inter_node_s: float = 0.0
    """Of the averages between nodes that follow its reductions, once per step."""
    exchange_s: float = 0.0
    """Of activations, for which the link has to be free."""
    unit: tuple[int, int] = (-1, -1)
    """Operator and position of the unit in it."""


class _OperatorStretches(NamedTuple):
    """The stretches of an operator in the passes, each in the order of the forward."""

    forward: list[_Stretch]
    recomputed: list[_Stretch]
    backward: list[_Stretch]
    unhidden_s: float
    """Seconds of each micro-batch's collectives that no compute hides, beside those that are played."""
    unhidden_per_step_s: float


def can_be_played(cluster: Cluster) -> bool:
    """Return whether collectives run as this module plays them: on CUDA, streams order them."""
    return cluster.ranks > 1 and not cluster.has_streams


def exposed_communication_s(
    model: ModelProfile,
    choices: Sequence[ShardingChoice],
    recomputed: Iterable[str],
    cluster: Cluster,
    compute: ComputeTimes,
    batch_size: int,
    accumulation: int = 1,
) -> float:
    """Return the seconds of an optimizer step in which a rank waits for collectives, exchanges of activations included.

    Args:
        model: the model, operators that share a unit merged into one.
        choices: for each of its operators.
        recomputed: names of the recomputed blocks.
        cluster: the ranks; ``can_be_played`` must be true of it.
        compute: the times of the operators.
        batch_size: samples of a micro-batch.
        accumulation: micro-batches.
    """
    names = set(recomputed)
    block_of = {index: block.name for block in model.blocks for index in block.operators if block.name in names}
    times = with_work_between(model, compute)
    stretches = [
        _operator_stretches(index, *operator, cluster, batch_size, index in block_of)
        for index, operator in enumerate(zip(model.operators, choices, compute.operators, times, strict=True))
    ]
    forward, backward = list(_forward(model, stretches)), list(_backward(model, stretches, block_of))
    link = _Link()
    waits_s = [link.play(forward, backward, is_last) for is_last in (False, True)[accumulation < 2 :]]
    idle_s = waits_s[-1] + (accumulation - 1) * waits_s[0]
    per_microbatch_s = sum(each.unhidden_s for each in stretches)
    return idle_s + accumulation * per_microbatch_s + sum(each.unhidden_per_step_s for each in stretches)


@dataclass
class _Link:
    """The clock of a rank, and when its links are free."""

    now_s: float = 0.0
    free_s: float = 0.0
    """When the link inside its node is free."""
    between_free_s: float = 0.0
    """When the link between nodes is free. Collectives of all ranks occupy both."""
    idle_s: float = 0.0
    _started: dict[int, float] = field(default_factory=dict)
    """When gathers that were started ahead end, by the position of their stretch."""

    def play(self, forward: Sequence[_Stretch], backward: Sequence[_Stretch], is_last: bool) -> float:
        """Return the seconds that the rank waits in a micro-batch; the last one averages gradients."""
        began_s = self.idle_s
        self._play_pass(forward, is_last)
        pending_s = self._play_pass(backward, is_last)
        self._wait_until(max(pending_s, self.between_free_s))
        return self.idle_s - began_s

    def _play_pass(self, stretches: Sequence[_Stretch], is_last: bool) -> float:
        """Play a pass and return when the last of its collectives that nothing has waited for ends."""
        pending_s = all_reduced_s = self.now_s
        following = _following_gathers(stretches)
        for index, stretch in enumerate(stretches):
            if stretch.gather is not None:
                ends_s = self._started.pop(index) if index in self._started else self._run(stretch.gather)
                self._wait_until(ends_s)
            if stretch.exchange_s:
                self._wait_until(max(self.now_s, self.free_s) + stretch.exchange_s)
            if stretch.gather is not None or stretch.exchange_s:
                self._gather_ahead(stretches, index, following)
            parts = max(1, len(stretch.reductions))
            for part in range(parts):
                self.now_s += stretch.compute_s / parts
                for reduction in stretch.reductions[part : part + 1]:
                    ends_s = self._run(reduction)
                    self._wait_until(pending_s if reduction.is_async else max(pending_s, ends_s))
                    pending_s = ends_s
            if is_last and stretch.all_reduce_s:
                all_reduced_s = self._run(_Collective(stretch.all_reduce_s))
            if is_last and stretch.inter_node_s:
                self.between_free_s = max(pending_s, self.between_free_s) + stretch.inter_node_s
        return max(pending_s, all_reduced_s)

    def _gather_ahead(self, stretches: Sequence[_Stretch], index: int, following: Sequence[int | None]) -> None:
        """Start the gathers of the next units, but for the same unit, which is freed first."""
        ahead = following[index]
        for _ in range(PREFETCHED_UNITS):
            gather = stretches[ahead].gather if ahead is not None else None
            if ahead is None or gather is None:
                return
            if gather.is_async and ahead not in self._started and stretches[ahead].unit != stretches[index].unit:
                self._started[ahead] = self._run(gather)
            ahead = following[ahead]

    def _run(self, collective: _Collective) -> float:
        """Start a collective when the links that it occupies are free, and return when it ends."""
        starts_s = max(self.now_s, self.free_s, self.between_free_s if collective.spans_nodes else 0.0)
        self.free_s = starts_s + collective.seconds
        if collective.spans_nodes:
            self.between_free_s = self.free_s
        return self.free_s

    def _wait_until(self, moment_s: float) -> None:
        self.idle_s += max(0.0, moment_s - self.now_s)
        self.now_s = max(self.now_s, moment_s)


def _following_gathers(stretches: Sequence[_Stretch]) -> list[int | None]:
    """Return for each stretch the position of the next one that gathers; none behind an exchange of activations."""
    following: list[int | None] = []
    ahead: int | None = None
    for index in range(len(stretches) - 1, -1, -1):
        following.append(ahead)
        if stretches[index].gather is not None or stretches[index].exchange_s:
            ahead = index if stretches[index].gather is not None else None
    return following[::-1]


def _forward(model: ModelProfile, stretches: Sequence[_OperatorStretches]) -> Iterator[_Stretch]:
    for index in forward_order(model):
        yield from stretches[index].forward


def _backward(
    model: ModelProfile, stretches: Sequence[_OperatorStretches], block_of: dict[int, str]
) -> Iterator[_Stretch]:
    """Yield the stretches of a backward pass, that of a recomputed block after its forward is run again."""
    order = forward_order(model)
    ran = dict.fromkeys(moment.operator for moment in model.moments if moment.phase == "backward")
    known = [index for index in ran if 0 <= index < len(stretches)]
    again: set[str] = set()
    for index in known or order[::-1]:
        block = block_of.get(index)
        if block is not None and block not in again:
            again.add(block)
            for other in order:
                if block_of.get(other) == block:
                    yield from stretches[other].recomputed
        yield from reversed(stretches[index].backward)


def _operator_stretches(
    index: int,
    operator: Operator,
    choice: ShardingChoice,
    time: OperatorTime,
    with_work: OperatorTime,
    cluster: Cluster,
    batch_size: int,
    is_recomputed: bool,
) -> _OperatorStretches:
    """Return the stretches of one operator.

    Args:
        index: its position in the model.
        operator: the operator.
        choice: its choice.
        time: its own times.
        with_work: the same with its part of what its block computes between operators.
        cluster: the ranks.
        batch_size: samples of a micro-batch.
        is_recomputed: whether its block is recomputed.
    """
    shards, links = shards_of(operator, choice), scope_links(cluster, choice.scope, choice.hierarchical)
    parts, gathers_again = _parts(shards, choice), is_recomputed and operator.num_wrapped == 1
    forward_s, backward_s = (
        own.value_at(batch_size) + whole.value_at(batch_size) - alone.value_at(batch_size)
        for own, whole, alone in zip(
            forward_backward_time(time, choice),
            (with_work.forward, with_work.backward),
            (time.forward, time.backward),
            strict=True,
        )
    )
    exchange_s = exchange_time(operator, choice, cluster, recomputed=is_recomputed).value_at(batch_size)
    exchange_s /= len(parts) * (3 if is_recomputed else 2)
    replicated_s, between_s = all_reduces_s(shards, cluster), inter_node_s(shards, links)
    hidden_all_reduces_s = cluster.link.all_reduce.overlap_fraction * replicated_s
    hidden_between_s = inter_node_s(shards, links.overlapped_part())
    stretches = _OperatorStretches(
        [], [], [], unhidden_s=0.0, unhidden_per_step_s=tensor_all_reduces_s(shards, cluster)
    )
    for position, unit in enumerate(parts):
        collectives = (
            _NOTHING if unit is None else _unit_collectives(unit, links, cluster, is_recomputed, gathers_again)
        )
        first, again, last = collectives.all_gathers
        forward = _Stretch(forward_s / len(parts), first, exchange_s=exchange_s, unit=(index, position))
        stretches.forward.append(forward)
        stretches.recomputed.append(forward._replace(gather=again))
        stretches.backward.append(
            _Stretch(
                backward_s / len(parts),
                last,
                collectives.reductions,
                hidden_all_reduces_s / len(parts),
                hidden_between_s / len(parts),
                exchange_s,
                unit=(index, position),
            )
        )
        stretches = stretches._replace(unhidden_s=stretches.unhidden_s + collectives.unhidden_s)
    unhidden_per_step_s = replicated_s - hidden_all_reduces_s + between_s - hidden_between_s
    return stretches._replace(unhidden_per_step_s=stretches.unhidden_per_step_s + unhidden_per_step_s)


def _parts(shards: OperatorShards, choice: ShardingChoice) -> list[ShardUnit | None]:
    """Return the unit of each slice, or of the whole operator; None if it is replicated."""
    if choice.split_dim is None:
        return [*shards.units] or [None]
    units = [unit for unit in shards.units for _ in range(unit.num_slices)]
    return [*units, *[None] * max(0, len(choice.slices) - len(units))]


class _UnitCollectives(NamedTuple):
    """The collectives of a unit in a micro-batch."""

    all_gathers: tuple[_Collective | None, _Collective | None, _Collective | None]
    """For the forward, for the forward that is run again, and for the backward."""
    reductions: tuple[_Collective, ...]
    unhidden_s: float
    """Their seconds that no compute hides."""


_NOTHING = _UnitCollectives((None, None, None), (), 0.0)


def _unit_collectives(
    unit: ShardUnit, links: ScopeLinks, cluster: Cluster, is_recomputed: bool, gathers_again: bool
) -> _UnitCollectives:
    """Return the collectives of a unit.

    Args:
        unit: the unit.
        links: of its scope.
        cluster: the ranks.
        is_recomputed: whether its block is recomputed.
        gathers_again: whether its parameters are freed between the forward that is run again and the backward.
    """
    is_async, spans_nodes = unit.is_prefetched(cluster), links.inter_node is None
    played_links = links.overlapped_part() if is_async else links
    whole, played = (
        unit_communication(unit, each, cluster, recomputed=gathers_again) for each in (links, played_links)
    )
    backward_s = unit_communication(unit, played_links, cluster, recomputed=False).backward_gathers_s
    first, again, last = (
        _Collective(seconds, is_async, spans_nodes) if seconds else None
        for seconds in (played.forward_s, played.backward_gathers_s - backward_s, backward_s)
    )
    if is_recomputed and not gathers_again:
        again, last = last, None
    num_early = len(unit.reduced_sizes) - 1 if played.early_reductions_s else 0
    reductions = [played.early_reductions_s / num_early] * num_early if num_early else []
    return _UnitCollectives(
        (first, again, last),
        tuple(
            _Collective(seconds, is_async, spans_nodes) for seconds in (*reductions, played.last_reduction_s) if seconds
        ),
        sum(whole) - sum(played),
    )
