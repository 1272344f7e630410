"""Two levels of links: process groups inside nodes and between them, and collectives in two stages.

With n nodes of d ranks, a full tensor of P bytes and shards of S = P / (n d), a ring over all ranks sends (n d - 1) S
out of each node. In two stages a node sends only what the other nodes lack: (n - 1) d S, which is (n - 1) / n of the
tensor. With two nodes of eight ranks that is half of the tensor instead of 15 / 16.

Note [layout]: ranks are numbered node by node, so the shards of one node are contiguous. Ranks with the same place in
their nodes exchange shards between nodes, each for its own column of the (n, d, S) tensor; every node's row is then
gathered inside the node, in place. Nothing is moved afterwards, and an all-gather on a CPU needs no buffer.

Note [pipeline]: on a CPU the rows go round the nodes as messages in the background. While one row is in flight, the one
before is gathered (or the next one summed) inside the node.

Note [cached groups]: a process group has connections, threads and buffers of its own (with NCCL a communicator, whose
buffers are on the device) until the default process group ends. Measurements and trials before training need the same
groups as training. So a group is created once for each purpose and reused.
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
from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.work import COMM_WAIT, Work

_TAG = 1 << 19
"""Tag of the first message between nodes, out of the way of the rings' and of a user's own."""


class Communicator(Protocol):
    """Collectives over the ranks of a group, flat or hierarchical."""

    def rank(self) -> int:
        """Return this rank's index in the group."""
        ...

    def size(self) -> int:
        """Return the number of ranks."""
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
    """Collectives over all ranks of a process group at once.

    Attributes:
        group: the process group.
        is_async: whether reduce-scatters may go on while the caller computes.
    """

    group: Any
    is_async: bool = False

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return int(self.group.rank())

    def size(self) -> int:
        """Return the number of ranks."""
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
        intra_node: the ranks of this rank's node.
        inter_node: the ranks with this rank's place in their nodes, one of each node, in the order of nodes.
    """

    world: Any
    intra_node: Any
    inter_node: Any

    @classmethod
    def create(cls, world: Any, nodes: int, backend: str | None = None) -> NodeGroups:
        """Create the groups. Collective: every rank of ``world`` must call it.

        Args:
            world: all ranks.
            nodes: number of nodes; it divides the number of ranks.
            backend: that of the groups, if not the default one.
        """
        ranks = dist.get_process_group_ranks(world)
        per_node = len(ranks) // nodes
        assert per_node * nodes == len(ranks), (len(ranks), nodes)
        rows = [ranks[node * per_node : (node + 1) * per_node] for node in range(nodes)]
        columns = [ranks[place::per_node] for place in range(per_node)]
        return cls(world, _create_subgroups(rows, world, backend), _create_subgroups(columns, world, backend))

    def destroy(self) -> None:
        """Destroy the groups inside nodes and between them. Collective."""
        dist.destroy_process_group(self.intra_node)
        dist.destroy_process_group(self.inter_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return int(self.inter_node.size())

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return int(self.intra_node.size())


class NodeLayout(NamedTuple):
    """How ranks are distributed over nodes."""

    sizes: tuple[int, ...]
    """Lengths of the runs of consecutive ranks on one node, in the order of ranks."""
    is_even: bool
    """Whether all runs are equally long, with one run for each node."""


def detect_node_layout(world: Any, node_rank: int) -> NodeLayout:
    """Ask all ranks which node they are on. Collective.

    Args:
        world: all ranks.
        node_rank: index of this rank's node, according to the cluster environment.
    """
    if is_emulated(world):
        return NodeLayout(world.node_sizes, is_even=len(set(world.node_sizes)) == 1)
    everyone: list[int] = [0] * world.size()
    dist.all_gather_object(everyone, node_rank, group=world)
    sizes = tuple(len(list(run)) for _, run in groupby(everyone))
    return NodeLayout(sizes, is_even=len(set(sizes)) == 1 and len(sizes) == len(set(everyone)))


def cached_group_copy(group: Any, purpose: str, backend: str | None = None) -> Any:
    """Return another process group of the same ranks and time-out for one ``purpose``. Collective.

    See Note [cached groups].
    """
    return _cached(group, purpose, lambda: _create_subgroups([dist.get_process_group_ranks(group)], group, backend))


def cached_host_group(group: Any) -> Any:
    """Return a group of the same ranks that sends tensors on the host, for which no device is waited. Collective."""
    return cached_group_copy(group, "host", "gloo") if dist.get_backend(group) == "nccl" else group


def cached_node_groups(world: Any, nodes: int, purpose: str, backend: str | None = None) -> NodeGroups:
    """Return ``NodeGroups`` for one ``purpose``, not to be destroyed. Collective. See Note [cached groups]."""
    key = f"{purpose} on {nodes} nodes"
    return cast(NodeGroups, _cached(world, key, lambda: NodeGroups.create(world, nodes, backend)))


_group_cache: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Groups by the group that they were made from and their purpose."""


def _cached(group: Any, purpose: str, make: Callable[[], Any]) -> Any:
    groups_by_purpose = _group_cache.setdefault(group, {})
    if purpose not in groups_by_purpose:
        groups_by_purpose[purpose] = make()
    return groups_by_purpose[purpose]


def _create_subgroups(groups: list[list[int]], parent: Any, backend: str | None = None) -> Any:
    """Create all groups and return this rank's, with the user's time-out instead of torch's default."""
    timeout = parent._get_backend(parent._device_types[0]).options._timeout
    mine, _ = dist.new_subgroups_by_enumeration(groups, timeout, backend)  # type: ignore[no-untyped-call]
    return mine


@dataclass(frozen=True)
class HierarchicalCommunicator:
    """Collectives over all ranks in two stages, between nodes and inside them."""

    node_groups: NodeGroups

    def rank(self) -> int:
        """Return this rank's index among all."""
        return int(self.node_groups.world.rank())

    def size(self) -> int:
        """Return the number of all ranks."""
        return int(self.node_groups.world.size())

    def all_gather(self, output_flat: Tensor, shard: Tensor) -> None:
        """Fill ``output_flat`` with all ranks' shards in rank order: to the bit what one stage gives.

        Args:
            output_flat: contiguous, 1-D, ``N * shard.numel()`` elements.
            shard: contiguous, 1-D, the same size on all ranks; it may be this rank's own part of ``output_flat``.
        """
        assert output_flat.numel() == self.size() * shard.numel(), (output_flat.shape, shard.shape, self.size())
        rows = output_flat.view(self.node_groups.nodes, self.node_groups.ranks_per_node, -1)  # (n, d, S)
        with torch.no_grad():
            if shard.device.type == "cpu" and not is_emulated(self.node_groups.world):
                self._pipelined_gather(rows, shard)
            else:
                self._native_gather(rows, shard)

    def all_gather_coalesced(self, outputs_flat: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
        """Gather one tensor after the other: each keeps the slow link busy by itself."""
        for output_flat, shard in zip(outputs_flat, shards, strict=True):
            self.all_gather(output_flat, shard)

    def reduce_scatter(self, output_shard: Tensor, full_flat: Tensor) -> None:
        """Sum ``full_flat`` over all ranks and write this rank's shard of the sum.

        Each node adds up its own ranks first, then the nodes' sums are added; one stage adds rank by rank. So the last
        bits may differ from those of one stage. On a CPU, place l of node m adds its node's ranks in the order
        l + 1, ..., l (modulo d) and the nodes in the order m + 1, ..., m (modulo n), so equal inputs give equal bits.

        Args:
            output_shard: contiguous, 1-D, ``full_flat.numel() / N`` elements; no part of ``full_flat``.
            full_flat: contiguous, 1-D, the same size on all ranks, divisible by N. It is not changed.
        """
        assert full_flat.numel() == self.size() * output_shard.numel(), (full_flat.shape, output_shard.shape)
        rows = full_flat.view(self.node_groups.nodes, -1)  # (n, d * S)
        with torch.no_grad():
            if full_flat.device.type == "cpu" and not is_emulated(self.node_groups.world):
                self._pipelined_scatter(output_shard, rows)
            else:
                self._native_scatter(output_shard, rows)

    def _pipelined_gather(self, rows: Tensor, shard: Tensor) -> None:
        """Pass columns round the nodes: node m receives those of m - 1, m - 2, ... and forwards all but the last."""
        nodes, node = self.node_groups.nodes, self.node_groups.inter_node.rank()
        column = rows[:, self.node_groups.intra_node.rank()]  # (n, S)
        if column[node].data_ptr() != shard.data_ptr():
            column[node].copy_(shard)
        for step in range(nodes):
            current, following = (node - step) % nodes, (node - step - 1) % nodes
            is_last = step == nodes - 1
            hop = [] if is_last else [self._send(column[current], step), self._receive(column[following], step)]
            collectives.all_gather(rows[current].view(-1), column[current], self.node_groups.intra_node)
            with COMM_WAIT.measure():
                for work in hop:
                    work.wait()

    def _pipelined_scatter(self, output_shard: Tensor, rows: Tensor) -> None:
        """Pass sums round the nodes: node m + 1 starts the sum for node m, and every node on the way adds its own."""
        nodes, node = self.node_groups.nodes, self.node_groups.inter_node.rank()
        # A sum is sent from one buffer while the next is made in the other; the last is made in the output.
        sums = output_shard.new_empty(min(2, nodes - 1), output_shard.numel())
        arriving = torch.empty_like(output_shard)
        receiving: Work | None = None
        sending: dict[int, Work] = {}
        for step in range(1, nodes + 1):
            if step - 2 in sending:
                sending.pop(step - 2).wait()
            partial_sum = output_shard if step == nodes else sums[step % len(sums)]
            collectives.reduce_scatter(partial_sum, rows[(node - step) % nodes], self.node_groups.intra_node)
            if receiving is not None:
                with COMM_WAIT.measure():
                    receiving.wait()
                    partial_sum.add_(arriving)
            if step < nodes:
                sending[step] = self._send(partial_sum, step)
                receiving = self._receive(arriving, step)
        with COMM_WAIT.measure():
            for work in sending.values():
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

    def _send(self, tensor: Tensor, step: int) -> Work:
        target = (self.node_groups.inter_node.rank() + 1) % self.node_groups.nodes
        work = dist.isend(tensor, group=self.node_groups.inter_node, group_dst=target, tag=_TAG + step)
        assert work is not None
        return work

    def _receive(self, tensor: Tensor, step: int) -> Work:
        source = (self.node_groups.inter_node.rank() - 1) % self.node_groups.nodes
        work = dist.irecv(tensor, group=self.node_groups.inter_node, group_src=source, tag=_TAG + step)
        assert work is not None
        return work
