"""How units are joined with their like on other ranks: over the world or a node, in one stage or two.

Group sharding: a unit that is spread over its node ends its backward pass with the mean of the node's gradients, for a
part that one rank of every other node holds as well. The mean of those is the mean over the world.

Note [averaging again does no harm]: once averaged, a shard is the same on all nodes, and so is its mean. So a shard
may be averaged, added to and averaged again, as accumulation without ``no_sync`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.collectives import Work, all_reduce_async
from lightning_osdp.levels import Communicator, OneStage, TwoStage, duplicate, lasting_levels
from lightning_osdp.planning.choices import Choice, Group, Mode
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.planning.topology import TOGETHER_BYTES
from lightning_osdp.sharding.ahead import Reduction


def sharded_operators(plan: ExecutionPlan) -> list[OperatorPlan]:
    """Operators that become units. One that is spread over a node of one rank is replicated."""
    alone = plan.cluster.nodes > 1 and plan.cluster.devices_per_node == 1
    return [
        op
        for op in plan.operators
        if any(mode != Mode.DP for mode in op.slices) and not (alone and op.sharding_group == Group.NODE)
    ]


def sharded_units(plan: ExecutionPlan) -> dict[str, list[OperatorPlan]]:
    """The same by the module that a unit lies around: an operator's own, or the block whose operators share one."""
    units: dict[str, list[OperatorPlan]] = {}
    for operator in sharded_operators(plan):
        units.setdefault(operator.unit or operator.name, []).append(operator)
    return units


@dataclass(frozen=True)
class Line:
    """How one unit is joined with its like.

    Attributes:
        group: the ranks that its parts are spread over.
        gather: for its all-gathers.
        reduce: for its reduce-scatters.
        between: what averages its gradient's parts between nodes; None if ``group`` is all ranks.
        ahead_bytes: units of up to this size are gathered and reduced beside compute.
        together_bytes: a unit's gradients of up to this size in all are reduced as one.
    """

    group: Any
    gather: Communicator
    reduce: Communicator
    between: BetweenNodes | None = None
    ahead_bytes: int = 0
    together_bytes: int = 0

    def runs_ahead(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether collectives of a unit with these parameters go on beside compute (``ahead``)."""
        return sum(parameter.nbytes for parameter in parameters) <= self.ahead_bytes and self.group.size() > 1

    def reduction(self, parameters: Sequence[nn.Parameter]) -> Communicator | Reduction:
        """For the reduce-scatters of a unit with these parameters, as ``planning.cost`` takes it for."""
        if self.runs_ahead(parameters):
            return OneStage(self.group, background=True)
        trained = [parameter.nbytes for parameter in parameters if parameter.requires_grad]
        if len(trained) > 1 and sum(trained) <= self.together_bytes:
            assert isinstance(self.reduce, OneStage)
            return Reduction(self.reduce, parameters)
        return self.reduce


class Lines:
    """The lines of all units, with as few process groups as they need.

    Args:
        world: all ranks.
        device: of this rank.
        choices: for the sharded operators.
        cluster: how many nodes there are.
    """

    def __init__(self, world: Any, device: torch.device, choices: Iterable[Choice], cluster: Cluster) -> None:
        # On CUDA, reductions run beside the gathers, on a stream and so on groups of their own.
        reduce_world = duplicate(world, "reductions") if device.type == "cuda" else world
        on_its_own = device.type == "cpu" and cluster.may_run_ahead  # streams do that on CUDA
        ahead_bytes, together_bytes = (cluster.ahead_bytes, TOGETHER_BYTES) if on_its_own else (0, 0)
        self._plain = Line(
            world, OneStage(world), OneStage(reduce_world), ahead_bytes=ahead_bytes, together_bytes=together_bytes
        )
        self._by_kind: dict[tuple[Group, bool], Line] = {}
        self.between = BetweenNodes(None)
        """Averages what is sharded inside nodes."""
        if cluster.two_levels and any(choice.group == Group.NODE or choice.two_stage for choice in choices):
            gather, reduce = (
                lasting_levels(group, cluster.nodes, purpose)
                for group, purpose in ((world, "gathers"), (reduce_world, "reductions"))
            )
            self.between = BetweenNodes(reduce.across)
            self._by_kind = {
                (Group.NODE, False): Line(gather.node, OneStage(gather.node), OneStage(reduce.node), self.between),
                (Group.WORLD, True): Line(world, TwoStage(gather), TwoStage(reduce)),
            }

    def of(self, choice: Choice) -> Line:
        """How a unit with this choice is joined. Where there is one level only, all are joined alike."""
        return self._by_kind.get((choice.group, choice.two_stage and choice.group == Group.WORLD), self._plain)


class BetweenNodes:
    """Averages gradient shards over the ranks that hold the same part in each node.

    Args:
        group: those ranks; None if no operator is sharded inside nodes.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._sync = True
        self._apart: dict[nn.Parameter, None] = {}  # in the order of the backward pass, the same on all nodes
        self._works: dict[nn.Parameter, Work] = {}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Shards pile up in each node within it, and cross the slow link once, with the next backward pass."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def before_accumulation(self, parameter: nn.Parameter) -> None:
        """To be called before a shard is added to: it may still be under way."""
        work = self._works.pop(parameter, None)
        if work is not None:
            work.wait()

    def shard_ready(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Starts to average ``shard``, the node's mean that piled up for ``parameter``, unless within ``no_sync``."""
        if self._sync:
            self._apart.pop(parameter, None)
            self._works[parameter] = all_reduce_async(shard, self._group)
        else:
            self._apart[parameter] = None

    def finish(self) -> None:
        """Averages what the last backward pass did not reach and waits for all of it. Nothing within ``no_sync``."""
        if not self._sync:
            return
        for parameter in self._apart:
            if parameter.grad is not None:
                self._works[parameter] = all_reduce_async(parameter.grad, self._group)
        self._apart.clear()
        for work in self._works.values():
            work.wait()
        self._works.clear()
