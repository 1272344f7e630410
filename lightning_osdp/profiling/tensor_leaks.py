"""Looks in the dataflow of a forward for what sees a slice where it needs the whole: such operators may not be cut.

Playing the ranks (``tensor_proof``) tries numbers; what is found here holds for all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_osdp.engine.tensor_parallel.scope import unknown_argument
from lightning_osdp.profiling.tracing.dataflow import Call, Dataflow, Event
from lightning_osdp.profiling.tracing.host_syncs import UnknownNumber

aten = torch.ops.aten

ROWWISE = frozenset(
    [
        *(aten.view, aten._unsafe_view, aten.reshape, aten.split, aten.split_with_sizes, aten.chunk, aten.slice),
        *(aten.select, aten.unbind, aten.view_as, aten.t, aten.transpose, aten.permute, aten.clone, aten.contiguous),
        *(aten.detach, aten.alias, aten.expand, aten.unsqueeze, aten.squeeze, aten.cat, aten._to_copy, aten.copy_),
        *(aten.empty_like, aten.ones_like, aten.zeros_like, aten.rand_like, aten.new_empty, aten.new_zeros, aten.lift),
        *(aten.native_dropout, aten.bernoulli_, aten.bernoulli, aten.glu, aten.lift_fresh, aten.fill_, aten.prelu),
        *(aten._prelu_kernel, aten.hardswish, aten.hardswish_, aten.log_sigmoid_forward),
    ]
)
"""Functions besides the pointwise ones that don't compute with several numbers of a row."""

COMPARES = frozenset([aten.gt, aten.ge, aten.lt, aten.le, aten.eq, aten.ne, aten.topk, aten.kthvalue, aten.argmax])
"""Functions that may lead to what happens for rare values alone, which no try would show; attentions do without."""

READS_VALUES = frozenset([aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select])


def find_leak(flow: Dataflow, columns: Sequence[Call], row: Call, scope: Call | None) -> str:
    """Say what hinders that the columns are cut; empty if nothing is found.

    Nothing but the row may see what comes from them, or what is made inside of the scope.

    Args:
        flow: What the forward did.
        columns: Calls of the column operators.
        row: The call of the row operator that they feed.
        scope: The call that gets gathered arguments; None if the columns gather their own input, and what happens in
            between must treat each number by itself.
    """
    members = {column.stack[-1] for column in columns} | {row.stack[-1]}
    start = min(column.start for column in columns) if scope is None else scope.start
    results = {column.stop: column.outputs for column in columns}
    arguments = frozenset(scope.inputs) if scope is not None else frozenset()
    found = _Followed(flow, start, scope, arguments)
    for index in range(start, row.start):
        found.cut.update(results.get(index, ()))
        if members.isdisjoint(flow.events[index].calls) and (reason := found.advance(index)):
            return reason
    found.cut.update(results.get(row.start, ()))
    if found.cut.isdisjoint(row.inputs):
        return "it does not reach the row"
    if any(flow.last_reads.get(each, -1) >= row.stop for each in found.cut | (found.inside - arguments)):
        return "it is used again later"
    return "" if scope is None else _scope_leak(found, row, scope)


def _scope_leak(found: _Followed, row: Call, scope: Call) -> str:
    flow, arguments = found.flow, found.arguments
    leaves = tree_leaves((scope.args, scope.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = next((len(each) for each in tensors if each.dim() > 1 and each.is_floating_point()), 0)
    others = [i for i, each in enumerate(tensors) if each.dim() == 0 or len(each) != rows]
    if not flow.rank_specific.isdisjoint(scope.inputs[i] for i in others):
        return "an argument without a row for each sample is each rank's own"
    if any(isinstance(leaf, UnknownNumber) for leaf in leaves):
        return "an argument is a number that .item() reads from a tensor"
    if kind := unknown_argument((scope.args, scope.kwargs), scope.module):
        return f"an argument is a {kind}, which may hold anything"
    if scope.is_cache_read:
        return "what it puts in a cache is read later"
    if not arguments.isdisjoint(scope.outputs):
        return "it returns its argument"
    if any(not arguments.isdisjoint(event.read_storages) for event in flow.events[row.stop : scope.stop]):
        return "its arguments are used after the row"
    own = found.cut | found.inside | arguments
    for event in flow.events[found.start : row.start]:  # results of a slice that nothing reads may be for a log
        is_moved = event.func.overloadpacket is aten._to_copy and event.read_storages.isdisjoint(own)
        is_lost = (
            event.written_storages
            and event.written_storages <= found.inside
            and event.written_storages.isdisjoint(row.inputs)
            and not is_moved  # as a cache moves the length of its window
        )
        if is_lost and event.written_storages.isdisjoint(flow.last_reads):
            return f"nothing uses the result of {_function_name(event)}"
    return ""


class _Followed:
    """Storages that are of other shapes on a rank, as far as the forward was followed.

    Attributes:
        cut: those that come from the columns.
        inside: those that come from the scope's arguments, or are made in it: also a constant may get its shape from
            what is divided.
    """

    def __init__(self, flow: Dataflow, start: int, scope: Call | None, arguments: frozenset[int]) -> None:
        self.flow, self.start, self.scope, self.arguments = flow, start, scope, arguments
        self.cut: set[int] = set()
        self.inside: set[int] = set()

    def advance(self, index: int) -> str:
        """Go on to an event; say why it may not be, empty if it may."""
        flow, event = self.flow, self.flow.events[index]
        is_inside = self.scope is not None and index < self.scope.stop
        if is_inside:
            self.inside.update(each for each in event.written_storages if flow.made.get(each) == index)
        own = self.cut | self.inside | (self.arguments if is_inside else frozenset())
        reads = event.read_storages & own
        if reads and (reason := self._refusal(event, own)):
            return reason
        if not self.cut.isdisjoint(reads):
            self.cut.update(event.written_storages)
        elif reads:
            self.inside.update(event.written_storages)
        return ""

    def _refusal(self, event: Event, own: set[int]) -> str:
        if event.func.overloadpacket in READS_VALUES or event.reads_numbers:
            return "numbers are read from it"
        if not self.flow.rank_specific.isdisjoint(event.read_storages - own):
            return f"{_function_name(event)} combines it with what each rank has of its own"
        if any(self.flow.made.get(each, -1) < self.start for each in event.changes - own):
            return f"{_function_name(event)} writes it to what was there before"
        if self.scope is None and not _is_rowwise(event):
            return f"{_function_name(event)} in between computes with several features of a row"
        if (
            self.scope is not None
            and event.func.overloadpacket in COMPARES
            and not self.cut.isdisjoint(event.read_storages)
        ):
            return f"{_function_name(event)} decides by its numbers"
        return ""


def _function_name(event: Event) -> str:
    """Return a function's name in torch."""
    return str(event.func.overloadpacket).partition(".")[2]


def _is_rowwise(event: Event) -> bool:
    return torch.Tag.pointwise in event.func.tags or event.func.overloadpacket in ROWWISE
