"""A process group whose other ranks are not there: what they would send is a copy of what this rank has.

It is registered with ``torch.distributed`` as the backend ``emulated``, so that DDP, FSDP, FairScale and the engine use
it as they use NCCL or gloo. Values mean nothing: a gathered weight is N copies of one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.backend.emulated import BACKEND
from lightning_osdp.emulation.absent_ranks_store import AbsentRanksStore
from lightning_osdp.emulation.argument_checks import (
    check_alike,
    check_contiguous,
    check_known,
    check_list,
    check_parts,
    check_rank,
    check_reduction,
    check_rows,
)
from lightning_osdp.emulation.call_forms import also_single
from lightning_osdp.emulation.link_clock import LinkClock
from lightning_osdp.emulation.links import Collective, EmulatedLinks
from lightning_osdp.emulation.messages import Mailbox
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.cluster import Cluster

_ProcessGroup: Any = dist.ProcessGroup  # torch calls methods of it by position, its stubs name other arguments

_UNAVAILABLE = ("merge_remote_group", "split_group", "use_pg_for_symm_mem_rendezvous")


def join(links: EmulatedLinks, timeout: timedelta = timedelta(minutes=30)) -> None:
    """Make this process rank 0 of the default process group of a cluster that is not there.

    Raises:
        ConfigurationError: the process is in a process group already.
    """
    if dist.is_initialized():
        raise ConfigurationError("this process is in a process group already: emulate in a process of its own")
    clock = LinkClock()

    def create(options: Any, _: Any = None) -> EmulatedGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        return EmulatedGroup(options.group_rank, ranks, links, clock, options.timeout)

    if BACKEND.upper() not in dist.Backend._plugins:
        devices = ["cpu", "cuda"]
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=devices)
    ranks = links.cluster.ranks
    _current.update(create=create, store=AbsentRanksStore(ranks))
    dist.init_process_group(BACKEND, store=_current["store"], rank=0, world_size=ranks, timeout=timeout)


_current: dict[str, Any] = {}
"""How groups of the present cluster are made, for a backend can be registered once only; and its store: torch does not
keep its Python part alive."""


def _create_group(options: Any, backend_options: Any = None) -> EmulatedGroup:
    group: EmulatedGroup = _current["create"](options, backend_options)
    return group


class EmulatedGroup(_ProcessGroup):  # type: ignore[misc]
    """Rank 0 of a cluster, or of some of its ranks, without the others.

    Args:
        rank: index of this process in the group.
        ranks: global numbers of the group's ranks.
        links: what their collectives cost.
        clock: lets that time pass; all groups of a process share it.
        timeout: what ``options`` tells of it; nothing here can time out.

    Attributes:
        bytes_sent: bytes of the unsharded tensors of all collectives so far, by their kind.
        calls: number of collectives so far.
    """

    is_emulated = True

    def __init__(
        self, rank: int, ranks: Sequence[int], links: EmulatedLinks, clock: LinkClock, timeout: timedelta
    ) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._ranks, self._links, self._clock = rank, tuple(ranks), links, clock
        self._occupied = links.occupied(ranks)
        self._timeout = timeout
        self._group_name = self._group_desc = ""
        self._mailbox = Mailbox()
        self.bytes_sent: dict[str, int] = {}
        self.calls = 0

    # -- what torch asks a process group for ---------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def name(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def _get_backend(self, device: torch.device) -> EmulatedGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]

    @property
    def options(self) -> SimpleNamespace:
        """The options of a backend."""
        return SimpleNamespace(_timeout=self._timeout)

    def rank(self) -> int:
        """Return this rank's index in the group."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    getRank, getSize = rank, size

    def setGroupName(self, name: str) -> None:
        """Set the name by which ``torch.distributed`` finds the group."""
        self._group_name = name

    def getGroupName(self) -> str:
        """Return the name by which ``torch.distributed`` finds the group."""
        return self._group_name

    @property
    def group_name(self) -> str:
        """The name by which ``torch.distributed`` finds the group."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:
        """Set the description."""
        self._group_desc = text

    def getGroupDesc(self) -> str:
        """Return the description."""
        return self._group_desc

    @property
    def group_desc(self) -> str:
        """The description."""
        return self._group_desc

    @property
    def cluster(self) -> Cluster:
        """The cluster that the process stands for."""
        return self._links.cluster

    def without_link_time(self) -> AbstractContextManager[None]:
        """Let collectives of all groups take no time of their links within a context."""
        return self._clock.paused()

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Number of ranks on each node of the cluster."""
        return self._links.node_sizes

    def abort(self) -> None:
        """Do nothing: no collective is ever stuck."""

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""

    def supports_splitting(self) -> bool:
        """Return False: new groups are made by ``new_group``."""
        return False

    # -- collectives ---------------------------------------------------------------------------------------------------

    @also_single(1, "op")
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce N copies of each tensor."""
        return self._run("all_reduce", lambda: self._reduce(tensors, opts), tensors, tensors=len(tensors))

    allreduce_coalesced = allreduce

    @also_single(1, "root", "op")
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce N copies of each tensor; the result is right on every rank."""
        check_rank("reduce", self._rank if opts is None else opts.rootRank, self.size())
        return self._run("reduce_scatter", lambda: self._reduce(tensors, opts), tensors)

    @also_single(1, "root")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Leave the tensors as they are: other ranks have the same."""
        self._check_root(tensors, opts, "broadcast")
        return self._run("all_gather", lambda: None, tensors)

    @also_single(2)
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy each input to all of its outputs."""
        for targets, source in zip(outputs, inputs, strict=True):
            check_list("all_gather", targets, source, self.size())

        def copy() -> None:
            for targets, source in zip(outputs, inputs, strict=True):
                for target in targets:
                    target.copy_(source)

        return self._run("all_gather", copy, [target for targets in outputs for target in targets])

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy the inputs to each list of outputs."""
        check_list("all_gather", output_lists, None, self.size())

        def copy() -> None:
            for outputs in output_lists:
                for target, source in zip(outputs, inputs, strict=True):
                    target.copy_(source)

        return self._run("all_gather", copy, [target for outputs in output_lists for target in outputs])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill each output with N copies of its input."""
        for target, source in zip(outputs, inputs, strict=True):
            check_parts("all_gather", target, source, self.size())
            check_contiguous("all_gather", target)

        def copy() -> None:
            for target, source in zip(outputs, inputs, strict=True):
                rows = target.view(self.size(), -1)
                row = source.reshape(1, -1)
                if rows[self._rank].data_ptr() == row.data_ptr():  # a shard that lies in its own output
                    rows[: self._rank].copy_(row)
                    rows[self._rank + 1 :].copy_(row)
                else:
                    rows.copy_(row)

        return self._run("all_gather", copy, outputs, tensors=len(outputs))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Fill each output with this rank's part of its input, reduced over N copies."""
        for target, source in zip(outputs, inputs, strict=True):
            check_parts("reduce_scatter", source, target, self.size())
        parts = [source.reshape(self.size(), -1)[self._rank] for source in inputs]
        return self._scatter("reduce_scatter", outputs, parts, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    @also_single(2, "op")
    def reduce_scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Fill each output with this rank's tensor of its list, reduced over N copies."""
        parts = self._own_parts("reduce_scatter", outputs, input_lists)
        return self._scatter("reduce_scatter", outputs, parts, [one for many in input_lists for one in many], opts)

    @also_single(2, "root")
    def scatter(
        self, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Fill each output with this rank's tensor of its list."""
        self._check_root(outputs, opts, "scatter")
        if not input_lists:  # another rank has them
            return self._run("all_gather", lambda: None, outputs, self.size() * _total_bytes(outputs))
        parts = self._own_parts("scatter", outputs, input_lists)
        return self._scatter("all_gather", outputs, parts, [one for many in input_lists for one in many])

    def _own_parts(self, name: str, outputs: Sequence[Tensor], input_lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        for output, tensors in zip(outputs, input_lists, strict=True):
            check_list(name, tensors, None, self.size())
            check_alike(name, tensors[self._rank], output)
        return [tensors[self._rank] for tensors in input_lists]

    @also_single(2, "root")
    def gather(self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Copy each input to all of its outputs, if this rank has outputs."""
        check_rank("gather", self._rank if opts is None else opts.rootRank, self.size())
        if output_lists:
            return self.allgather(output_lists, inputs)
        return self._run("all_gather", lambda: None, inputs, self.size() * _total_bytes(inputs))

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None
    ) -> dist.Work:
        """Fill the output with N copies of the part of the input that is for this rank."""
        ranks = self.size()
        check_rows("all_to_all", (output, input), (output_sizes, input_sizes), ranks)
        parts = torch.split(input, input_sizes) if input_sizes else input.chunk(ranks)
        targets = torch.split(output, output_sizes) if output_sizes else output.chunk(ranks)
        return self.alltoall(targets, parts) if parts and targets else self._run("all_to_all", lambda: None, [output])

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Fill each output with the input that is for this rank, or with zeros where the sizes differ."""
        check_list("all_to_all", outputs, None, self.size())
        (own,) = self._own_parts("all_to_all", [outputs[self._rank]], [inputs])

        def copy() -> None:
            for target in outputs:
                target.copy_(own) if target.shape == own.shape else target.zero_()

        return self._run("all_to_all", copy, outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait as long as an empty all-reduce takes."""
        return self._run("all_reduce", lambda: None, [torch.empty(0, device=self._device_types[0])])

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """Wait as long as an empty all-reduce takes."""
        self.barrier().wait()

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> dist.Work:
        """Send a message that nobody gets: a copy of it is received."""
        check_rank("send", target, self.size())
        return self._mailbox.send(tensors[0], target, tag, partial(self._message, tensors, target))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        """Receive a copy of what this rank sends, in that order; of what was not sent, zeros."""
        check_rank("recv", source, self.size())
        return self._mailbox.receive(tensors[0], source, tag, partial(self._message, tensors, source))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Receive from the next rank."""
        return self.recv(tensors, (self._rank + 1) % self.size(), tag)

    # torch 2.13 calls some of them by other names.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _start_coalescing(self, device: torch.device) -> None:
        """Go on: collectives on one link come one after the other anyway."""

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._clock.start(lambda: None, [torch.empty(0, device=device)], 0.0, self._occupied)

    # -- how they run --------------------------------------------------------------------------------------------------

    def _run(
        self,
        kind: Collective,
        copy: Callable[[], None],
        results: Sequence[Tensor],
        num_bytes: int | None = None,
        tensors: int = 1,
    ) -> dist.Work:
        num_bytes = _total_bytes(results) if num_bytes is None else num_bytes
        self.calls += 1
        self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + num_bytes
        seconds = self._links.seconds(kind, num_bytes, self._ranks, tensors)

        return self._clock.start(torch.no_grad()(copy), results, seconds, self._occupied)

    def _message(
        self, sent: Sequence[Tensor], peer: int, copy: Callable[[], None], results: Sequence[Tensor]
    ) -> dist.Work:
        pair = (self._ranks[self._rank], self._ranks[peer])
        return self._clock.start(
            copy, results, self._links.message_s(_total_bytes(sent), pair), self._links.occupied(pair)
        )

    def _scatter(
        self,
        kind: Collective,
        outputs: Sequence[Tensor],
        parts: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> dist.Work:
        def copy() -> None:
            for target, part in zip(outputs, parts, strict=True):
                target.copy_(part.view_as(target))
            if kind == "reduce_scatter":
                self._reduce(outputs, opts)

        return self._run(kind, copy, outputs, _total_bytes(inputs), len(outputs))

    def _reduce(self, tensors: Sequence[Tensor], opts: Any) -> None:
        """Replace each tensor by the reduction of N copies of it.

        Raises:
            ConfigurationError: the reduction is not emulated, or not for such tensors.
        """
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        check_reduction(op, tensors)
        numbers = [tensor for tensor in tensors if tensor.dtype != torch.bool]  # a sum of truths is the same truth
        if op == dist.ReduceOp.SUM:
            for tensor in numbers:
                tensor.mul_(self.size())
        elif op == dist.ReduceOp.PRODUCT:
            for tensor in numbers:
                tensor.pow_(self.size())
        elif op == dist.ReduceOp.BXOR and self.size() % 2 == 0:
            for tensor in tensors:
                tensor.zero_()

    def _check_root(self, tensors: Sequence[Tensor], opts: Any, name: str) -> None:
        """Refuse to take from another rank what this one can't know, such as the length of a pickled object.

        Raises:
            ConfigurationError: integers would come from another rank.
        """
        root = 0 if opts is None else opts.rootRank
        check_rank(name, root, self.size())
        if root != self._rank:
            check_known(name, tensors, self._ranks[root])


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigurationError(f"{name} of a process group is not emulated")

    refuse.__doc__ = "Raise ConfigurationError: this is not emulated."
    return refuse


for _name in _UNAVAILABLE:
    setattr(EmulatedGroup, _name, _refuse(_name))


def _total_bytes(tensors: Sequence[Tensor]) -> int:
    dense = [
        part for tensor in tensors for part in ([tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor])
    ]
    return sum(tensor.nbytes for tensor in dense)
