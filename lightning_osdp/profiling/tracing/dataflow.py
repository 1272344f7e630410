"""Records which tensors the forward of a traced step reads and writes, and in which calls of modules.

Tensors are told apart by their storages. All of them live until the recording is dropped: they are fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.engine.key_value_cache import copy_caches, describe_unused, filled_layer, note_reads
from lightning_osdp.profiling.kernels.benchmark import tensors_of
from lightning_osdp.profiling.tracing import fake_kernels
from lightning_osdp.profiling.tracing.aten_calls import storage_key, written_values
from lightning_osdp.profiling.tracing.host_syncs import UnknownNumber

MAX_SOURCES = 32
"""Products whose results a tensor may combine before it is no longer followed where it comes from."""

SILENT_NAMESPACES = ("prim", "profiler")

NO_SOURCES: frozenset[int] = frozenset()
MANY_SOURCES: frozenset[int] = frozenset([-1])


@dataclass(slots=True)
class Event:
    """One aten call of the forward."""

    func: torch._ops.OpOverload
    read_storages: frozenset[int]
    """Storages of its arguments."""
    written_storages: frozenset[int]
    """Storages of its results, and of what it changes."""
    changes: frozenset[int]
    """Storages of what it changes."""
    calls: tuple[int, ...]
    """Calls of modules that were running, outermost first."""
    signature: int
    """Equal for calls of one function with equal shapes, dtypes and numbers."""
    reads_numbers: bool
    """Whether one of its numbers was read from a tensor."""


@dataclass(slots=True)
class Call:
    """One call of a module's forward."""

    module: nn.Module
    stack: tuple[int, ...]
    """Calls that were running, outermost first, this one included."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    """Arguments; a cache of keys and values that the call fills is a copy from before."""
    start: int
    """Index of its first event."""
    inputs: tuple[int, ...]
    """Storages of the tensors in its arguments."""
    input_key: tuple[Any, ...]
    """Equal for calls that read the same values as their first tensor."""
    input_sources: frozenset[int]
    """Calls of products that the first tensor was made from without another product in between."""
    stop: int = -1
    """Index after its last event; -1 if it never ended."""
    outputs: tuple[int, ...] = ()
    """Storages of the tensors in its results."""
    output: Any = None
    is_cache_read: bool = False
    """Whether the forward looks later at the keys and values that the call has put in a cache."""


@dataclass
class Dataflow:
    """The forward of one step."""

    events: list[Event] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    last_reads: dict[int, int] = field(default_factory=dict)
    """Index of the last event that reads each storage."""
    made: dict[int, int] = field(default_factory=dict)
    """Index of the event that made each storage; without those that were there before."""
    rank_specific: set[int] = field(default_factory=set)
    """Storages whose values depend on the batch or on random numbers: ranks have different ones."""


class DataflowRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills a ``Dataflow``; enter it after (inside of) a FakeTensorMode."""

    def __init__(self, products: Iterable[nn.Module], batch: Any) -> None:
        """Prepare a recording.

        Args:
            products: Modules whose calls are followed as a whole, as linear layers are.
            batch: What the step is given.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = Dataflow()
        self._products = {id(module) for module in products}
        self._stack: list[int] = []
        self._alive: list[Any] = []
        self._serials: dict[int, int] = {}
        self._num_changes: dict[int, int] = {}
        self._unused_caches: dict[int, list[Any]] = {}
        self._undo: list[Callable[[], None]] = []
        self._sources: dict[int, frozenset[int]] = {}
        self.flow.rank_specific.update(self._storages(batch))

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record aten calls and calls of modules until the end of the block."""
        call = nn.Module._call_impl

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            begun = self._begin(module, args, kwargs)
            output = None
            try:
                output = call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
                return output
            finally:
                self._end(begun, output)

        nn.Module._call_impl = recorded_call  # type: ignore[method-assign, assignment]
        try:
            with self:
                yield
        finally:
            nn.Module._call_impl = call  # type: ignore[method-assign]
            while self._undo:
                self._undo.pop()()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        number, flow = len(self.flow.calls), self.flow
        self._stack.append(number)
        tensors = tensors_of((args, kwargs))
        storages = tuple(self._serial(tensor) for tensor in tensors)
        key: tuple[Any, ...] = ()
        if tensors:
            first, serial = tensors[0], storages[0]
            layout = (
                (first.storage_offset(), tuple(first.shape), first.stride()) if first.layout == torch.strided else ()
            )
            key = (serial, self._num_changes.get(serial, 0), *layout)
        sources = self._sources.get(storages[0], NO_SOURCES) if storages else NO_SOURCES
        caches = [each for each in (*args, *kwargs.values()) if describe_unused(each, module)]
        if caches and torch.is_grad_enabled():  # else it is there to be read
            self._unused_caches[number] = caches
            args, kwargs = copy_caches(args, kwargs)
        flow.calls.append(Call(module, tuple(self._stack), args, kwargs, len(flow.events), storages, key, sources))
        return number

    def _end(self, number: int, output: Any) -> None:
        while self._stack and self._stack[-1] != number:
            self._stack.pop()
        if self._stack:
            self._stack.pop()
        call = self.flow.calls[number]
        call.stop, call.output = len(self.flow.events), output
        call.outputs = self._storages(output)
        if id(call.module) in self._products:
            self._sources.update(dict.fromkeys(call.outputs, frozenset([number])))
        for cache in self._unused_caches.pop(number, ()):
            if (layer := filled_layer(cache, call.module)) is not None:
                self._undo.append(note_reads(layer, partial(setattr, call, "is_cache_read", True)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = fake_kernels.dispatch(func, args, kwargs)
        if func.namespace not in SILENT_NAMESPACES and torch._C._current_autograd_node() is None:
            self._record(func, args, kwargs, out)
        return out

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        flow, index = self.flow, len(self.flow.events)
        leaves = tree_leaves((args, kwargs))
        reads = frozenset(self._serial(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        changes = frozenset(self._storages(written_values(func, args, kwargs)))
        writes = changes.union(self._storages(out))
        numbers = tuple(_describe(leaf) for leaf in leaves)
        has_numbers = any(isinstance(leaf, UnknownNumber) for leaf in leaves)
        signature = hash((func, numbers))
        flow.events.append(Event(func, reads, writes, changes, tuple(self._stack), signature, has_numbers))
        flow.last_reads.update(dict.fromkeys(reads, index))
        if torch.Tag.nondeterministic_seeded in func.tags or not reads.isdisjoint(flow.rank_specific):
            flow.rank_specific.update(writes)
        sources = self._merge_sources(reads)
        flow.made.update((storage, index) for storage in writes - reads if storage not in self._sources)
        for storage in writes:
            self._sources[storage] = sources | self._sources.get(storage, NO_SOURCES)
        for storage in changes:
            self._num_changes[storage] = self._num_changes.get(storage, 0) + 1

    def _merge_sources(self, storages: Iterable[int]) -> frozenset[int]:
        merged = NO_SOURCES.union(*(self._sources.get(storage, NO_SOURCES) for storage in storages))
        return MANY_SOURCES if len(merged) > MAX_SOURCES or merged >= MANY_SOURCES else merged

    def _storages(self, value: Any) -> tuple[int, ...]:
        return tuple(self._serial(tensor) for tensor in tensors_of(value))

    def _serial(self, tensor: Tensor) -> int:
        """Return a number of the tensor's storage; a sparse tensor counts as one of its own."""
        key = storage_key(tensor) if tensor.layout == torch.strided else -id(tensor)
        serial = self._serials.get(key)
        if serial is None:
            serial = self._serials[key] = len(self._serials)
            self._alive.append(tensor)
        return serial


def _describe(leaf: Any) -> Any:
    """Return a hashable description of an argument: of tensors their shape and dtype."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.dtype)
    return leaf if isinstance(leaf, int | float | str | bool | torch.dtype | type(None)) else str(type(leaf))


def record_dataflow(run_step: Callable[[], Any], products: Iterable[nn.Module], batch: Any) -> Dataflow:
    """Return the dataflow of ``run_step``, which runs a forward; arguments as of ``DataflowRecorder``."""
    recorder = DataflowRecorder(products, batch)
    with recorder.record():
        run_step()
    return recorder.flow


def leaves_of_graph(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors for which a backward pass from others would make gradients."""
    nodes, seen, leaves = [getattr(tensor, "grad_fn", None) for tensor in tensors], set[Any](), list[Tensor]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaves += [node.variable] if hasattr(node, "variable") else []
    return leaves
