"""Two levels of links: process groups inside nodes and between them, and world-wide collectives in two stages.

With n nodes of d ranks, a world-wide tensor of P bytes and parts of S = P / (n d), a ring over all ranks sends
(n d - 1) S out of each node. In two stages a node sends what the other nodes lack and no more: (n - 1) d S, which is
(n - 1) / n of the tensor. With two nodes of eight ranks that is half of the tensor instead of 15 / 16.

Note [layout]: ranks are numbered node by node, so the parts of one node lie side by side. Ranks with the same place in
their nodes exchange parts between nodes, each for its own column of the (n, d, S) tensor; every node's row is then
gathered inside the node, right where it belongs. Nothing is moved afterwards, and a gather on a CPU needs no buffer.

Note [the slow link is kept busy]: on a CPU the rows go round the nodes as messages in the background. While one is on
its way, the one before is gathered (or the next one summed) inside the node.

Note [groups last]: a process group has connections, threads and buffers of its own (with NCCL a communicator, whose
buffers are on the device) until the whole process group ends. What is measured and rehearsed before training needs the
same ones as training does, one after the other. So a group is made once for each purpose, and found again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend import collectives

_TAG = 1 << 19
"""Of the first message between nodes, out of the way of the rings' and of a user's own."""


class Communicator(Protocol):
    """How the ranks of a group exchange what they share."""

    def rank(self) -> int:
        """This rank's place in the group."""
        ...

    def size(self) -> int:
        """Ranks in the group."""
        ...

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """See ``collectives.all_gather``."""
        ...

    def all_gather_coalesced(self, outputs_flat: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """See ``collectives.all_gather_coalesced``."""
        ...

    def reduce_scatter(self, output_shard: Tensor, full_flat: Tensor) -> None:
        """See ``collectives.reduce_scatter``; the order of the sum is the communicator's own."""
        ...


@dataclass(frozen=True)
class FlatCommunicator:
    """All ranks of a process group at once.

    Attributes:
        group: the ranks.
        is_async: whether its reduce-scatters may go on while the caller computes.
    """

    group: Any
    is_async: bool = False

    def rank(self) -> int:
        """This rank's place in the group."""
        return int(self.group.rank())

    def size(self) -> int:
        """Ranks in the group."""
        return int(self.group.size())

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """See ``collectives.all_gather``."""
        collectives.all_gather(output_flat, shard, self.group)

    def all_gather_coalesced(self, outputs_flat: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """See ``collectives.all_gather_coalesced``."""
        collectives.all_gather_coalesced(outputs_flat, shards, self.group)

    def reduce_scatter(self, output_shard: Tensor, full_flat: Tensor) -> None:
        """See ``collectives.reduce_scatter``."""
        collectives.reduce_scatter(output_shard, full_flat, self.group)

    def reduce_scatter_coalesced(self, output_shards: Sequence[Tensor], full_flats: Sequence[Tensor]) -> None:
        """See ``collectives.reduce_scatter_coalesced``."""
        collectives.reduce_scatter_coalesced(output_shards, full_flats, self.group)


@dataclass(frozen=True)
class NodeGroups:
    """The process groups of equally large nodes whose ranks are numbered node by node.

    Attributes:
        world: all ranks.
        intra_node: those of this rank's node.
        inter_node: those with this rank's place in their nodes, one of each node, in the order of nodes.
    """

    world: Any
    intra_node: Any
    inter_node: Any

    @classmethod
    def create(cls, world: Any, nodes: int) -> NodeGroups:
        """Makes the groups. Collective: every rank of ``world`` calls it alike.

        Args:
            world: all ranks.
            nodes: how many nodes they are on; divides their number.
        """
        ranks = dist.get_process_group_ranks(world)
        per_node = len(ranks) // nodes
        assert per_node * nodes == len(ranks), (len(ranks), nodes)
        rows = [ranks[node * per_node : (node + 1) * per_node] for node in range(nodes)]
        columns = [ranks[place::per_node] for place in range(per_node)]
        return cls(world, _create_subgroups(rows, world), _create_subgroups(columns, world))

    def destroy(self) -> None:
        """Ends the groups inside nodes and between them. Collective."""
        dist.destroy_process_group(self.intra_node)
        dist.destroy_process_group(self.inter_node)

    @property
    def nodes(self) -> int:
        """How many there are."""
        return int(self.inter_node.size())

    @property
    def ranks_per_node(self) -> int:
        """Ranks of each node."""
        return int(self.intra_node.size())


class NodeLayout(NamedTuple):
    """Which ranks share a node."""

    sizes: tuple[int, ...]
    """Ranks that stand one after the other on one node, in the order of ranks."""
    is_even: bool
    """Whether these are all of each node's, and equally many on each."""


def detect_node_layout(world: Any, node_rank: int) -> NodeLayout:
    """Asks all ranks which node they are on. Collective.

    Args:
        world: all ranks.
        node_rank: which node this rank is on, as the cluster environment says.
    """
    everyone: list[int] = [0] * world.size()
    dist.all_gather_object(everyone, node_rank, group=world)
    sizes = tuple(len(list(run)) for _, run in groupby(everyone))
    return NodeLayout(sizes, is_even=len(set(sizes)) == 1 and len(sizes) == len(set(everyone)))


def cached_group_copy(group: Any, purpose: str) -> Any:
    """Another process group of the same ranks, with the same time-out, for one ``purpose``. Collective.

    See Note [groups last].
    """
    return _cached(group, purpose, lambda: _create_subgroups([dist.get_process_group_ranks(group)], group))


def cached_node_groups(world: Any, nodes: int, purpose: str) -> NodeGroups:
    """``Levels.of`` for one ``purpose``; not to be destroyed. Collective. See Note [groups last]."""
    return cast(NodeGroups, _cached(world, f"{purpose} on {nodes} nodes", lambda: NodeGroups.create(world, nodes)))


_group_cache: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""By the group that they were made of and what they are for."""


def _cached(group: Any, purpose: str, make: Callable[[], Any]) -> Any:
    made = _group_cache.setdefault(group, {})
    if purpose not in made:
        made[purpose] = make()
    return made[purpose]


def _create_subgroups(groups: list[list[int]], parent: Any) -> Any:
    """Makes all groups and returns this rank's. torch would give them its default time-out instead of the user's."""
    timeout = parent._get_backend(parent._device_types[0]).options._timeout
    mine, _ = dist.new_subgroups_by_enumeration(groups, timeout=timeout)  # type: ignore[no-untyped-call]
    return mine


@dataclass(frozen=True)
class HierarchicalCommunicator:
    """All ranks, first between nodes and then inside them, or the other way round."""

    node_groups: NodeGroups

    def rank(self) -> int:
        """This rank's place among all."""
        return int(self.node_groups.world.rank())

    def size(self) -> int:
        """All ranks."""
        return int(self.node_groups.world.size())

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """Fills ``output_flat`` with all ranks' shards in rank order: to the bit what one stage gives.

        Args:
            output_flat: contiguous, 1-D, ``N * shard.numel()`` elements.
            shard: contiguous, 1-D, the same size on all ranks; it may be its own part of ``output_flat``.
        """
        assert output_flat.numel() == self.size() * shard.numel(), (output_flat.shape, shard.shape, self.size())
        rows = output_flat.view(self.node_groups.nodes, self.node_groups.ranks_per_node, -1)  # (n, d, S)
        with torch.no_grad():
            if shard.device.type == "cpu":
                self._pipelined_gather(rows, shard)
            else:
                self._native_gather(rows, shard)

    def all_gather_coalesced(self, outputs_flat: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """One after the other: each keeps the slow link busy by itself."""
        for output_flat, shard in zip(outputs_flat, shards, strict=True):
            self.all_gather(output_flat, shard)

    def reduce_scatter(self, output_shard: Tensor, full_flat: Tensor) -> None:
        """Sums ``full_flat`` over all ranks and keeps this rank's part of the sum.

        Each node adds up its own ranks first, and then the nodes' sums are added; one stage adds rank by rank. Both
        are the same to the bit where the additions are exact, else they round differently in the last bits. On a CPU,
        place l of node m adds its node's ranks in the order l + 1, ..., l (modulo d) and the nodes in the order
        m + 1, ..., m (modulo n), so equal inputs give equal bits.

        Args:
            output_shard: contiguous, 1-D, ``whole_flat.numel() / N`` elements; no part of ``full_flat``.
            full_flat: contiguous, 1-D, the same size on all ranks, divisible by N. It is not changed.
        """
        assert full_flat.numel() == self.size() * output_shard.numel(), (full_flat.shape, output_shard.shape)
        rows = full_flat.view(self.node_groups.nodes, -1)  # (n, d * S)
        with torch.no_grad():
            if full_flat.device.type == "cpu":
                self._pipelined_scatter(output_shard, rows)
            else:
                self._native_scatter(output_shard, rows)

    def _pipelined_gather(self, rows: Tensor, shard: Tensor) -> None:
        """Node m takes the columns of nodes m - 1, m - 2, ... from its left and passes all but the last on."""
        nodes, node = self.node_groups.nodes, self.node_groups.inter_node.rank()
        column = rows[:, self.node_groups.intra_node.rank()]  # (n, S)
        if column[node].data_ptr() != shard.data_ptr():
            column[node].copy_(shard)
        for step in range(nodes):
            current, following = (node - step) % nodes, (node - step - 1) % nodes
            last = step == nodes - 1
            hop = [] if last else [self._send(column[current], step), self._receive(column[following], step)]
            collectives.all_gather(rows[current].view(-1), column[current], self.node_groups.intra_node)
            with collectives.COMM_WAIT.measure():
                for work in hop:
                    work.wait()

    def _pipelined_scatter(self, output_shard: Tensor, rows: Tensor) -> None:
        """Node m + 1 begins the sum for node m, and every node on the way adds its own: a ring of nodes."""
        nodes, node = self.node_groups.nodes, self.node_groups.inter_node.rank()
        # A sum is sent from one buffer while the next is made in the other; the last is made in the output.
        sums = output_shard.new_empty(min(2, nodes - 1), output_shard.numel())
        arriving = torch.empty_like(output_shard)
        received: Any = None
        sent: dict[int, Any] = {}
        for step in range(1, nodes + 1):
            if step - 2 in sent:
                sent.pop(step - 2).wait()
            partial = output_shard if step == nodes else sums[step % len(sums)]
            collectives.reduce_scatter(partial, rows[(node - step) % nodes], self.node_groups.intra_node)
            if received is not None:
                with collectives.COMM_WAIT.measure():
                    received.wait()
                    partial.add_(arriving)
            if step < nodes:
                sent[step] = self._send(partial, step)
                received = self._receive(arriving, step)
        with collectives.COMM_WAIT.measure():
            for work in sent.values():
                work.wait()

    def _native_gather(self, rows: Tensor, shard: Tensor) -> None:
        column = shard.new_empty(self.node_groups.nodes, shard.numel())  # (n, S)
        collectives.all_gather(column.view(-1), shard, self.node_groups.inter_node)
        for row, part in zip(rows, column, strict=True):
            collectives.all_gather(row.view(-1), part, self.node_groups.intra_node)

    def _native_scatter(self, output_shard: Tensor, rows: Tensor) -> None:
        sums = output_shard.new_empty(self.node_groups.nodes, output_shard.numel())  # (n, S)
        for row, part in zip(rows, sums, strict=True):
            collectives.reduce_scatter(part, row, self.node_groups.intra_node)
        collectives.reduce_scatter(output_shard, sums.view(-1), self.node_groups.inter_node)

    def _send(self, tensor: Tensor, step: int) -> collectives.Work:
        to = (self.node_groups.inter_node.rank() + 1) % self.node_groups.nodes
        work = dist.isend(tensor, group=self.node_groups.inter_node, group_dst=to, tag=_TAG + step)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, step: int) -> collectives.Work:
        source = (self.node_groups.inter_node.rank() - 1) % self.node_groups.nodes
        work = dist.irecv(tensor, group=self.node_groups.inter_node, group_src=source, tag=_TAG + step)
        assert work is not None
        return work
