"""Records one training step below autograd: every aten call, the modules that ran it, and what it allocates and frees.

It works on fake and on real tensors, and never keeps a tensor alive: storages are followed by weak references.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.planning.spec.model import Phase
from lightning_osdp.profiling.kernels.kernel import Spec, TensorSpec, spec_of
from lightning_osdp.profiling.tracing import fake_kernels
from lightning_osdp.profiling.tracing.aten_calls import count_flops, storage_key, storage_keys, written_keys
from lightning_osdp.profiling.tracing.dataflow import leaves_of_graph
from lightning_osdp.profiling.tracing.kept_state import find_changed_attribute, kept_state
from lightning_osdp.profiling.tracing.running_function import RunningFunction, is_in_autograd_engine, next_autograd_node

aten = torch.ops.aten

SILENT_NAMESPACES = ("prim", "profiler")
"""Namespaces of questions about a tensor and of profiler marks, which are no work."""


@dataclass(slots=True)
class Op:
    """One aten call."""

    func: torch._ops.OpOverload
    args: tuple[Spec, ...]
    kwargs: tuple[tuple[str, Spec], ...]
    phase: Phase
    site: tuple[str, ...]
    """Modules that were running, outermost first, without the root; in backward, when the node was made."""
    node: int
    """Sequence number of its autograd node."""
    used_parameters: tuple[int, ...]
    """Indices of parameters whose storage is among its arguments."""
    flops: float
    is_view: bool
    """Whether it makes no new storage and changes nothing, and so costs no time."""
    is_accumulation: bool
    """Whether it adds two gradients of an activation. Autograd does that in place, but not while a dispatch mode is
    active: the result replaces the first argument."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One run of a module's forward that is not a recomputation."""

    name: str
    start: int
    """Index of its first op."""
    stop: int
    """Index after its last op."""
    inputs: frozenset[int]
    """Storages of what it is given, but for parameters and buffers."""
    outputs: frozenset[int]
    """Storages of its results."""


@dataclass(slots=True)
class Recording:
    """All that happened in one step."""

    ops: list[Op] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    """Allocations (+1) and frees (-1) in the order of time: (index of the current op, storage, sign)."""
    storage_bytes: list[int] = field(default_factory=list)
    gradient_storages: set[int] = field(default_factory=set)
    """Storages that turned out to be gradients of parameters."""
    planned_storages: set[int] = field(default_factory=set)
    """Storages that are left out of the live bytes since they depend on the plan (``weight_casts``)."""
    weight_casts: dict[int, int] = field(default_factory=dict)
    """Parameters by the storages of autocast's casts of them."""
    cast_dtypes: dict[int, set[torch.dtype]] = field(default_factory=dict)
    """Types of autocast's casts, and those that it computes in where rows are looked up, by index of parameter."""
    read_as_is: set[int] = field(default_factory=set)
    """Indices of parameters whose memory anything but such a cast or look-up gets."""
    read_in_backward: set[int] = field(default_factory=set)
    """Indices of parameters whose own memory is read in backward."""
    casts_read_in_backward: set[int] = field(default_factory=set)
    """Indices of parameters of which casts are read in backward, which autograd has saved."""
    gradients: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Indices of the op that began to make each parameter's gradient and of the last one before it was complete."""
    calls: Counter[str] = field(default_factory=Counter)
    """Number of runs of each module in forward, without recomputation."""
    module_calls: list[ModuleCall] = field(default_factory=list)
    """Runs of modules, in the order in which they ended."""
    recomputed_modules: set[str] = field(default_factory=set)
    """Modules that also ran in backward: the model recomputes them by itself."""
    buffer_writers: set[str] = field(default_factory=set)
    """Modules whose forward changes buffers or parameters."""
    outside_writers: set[str] = field(default_factory=set)
    """Modules whose forward changes tensors in place that were there before it: its input, or what others keep."""
    state_changers: dict[str, str] = field(default_factory=dict)
    """By module, an attribute that its forward changes so that a second one would differ."""
    changed_parameters: set[int] = field(default_factory=set)
    """Indices of parameters that a forward, or a hook of a module, changes."""
    differentiated_parameters: set[int] = field(default_factory=set)
    """Indices of parameters whose gradients are asked for by themselves, as by ``torch.autograd.grad``."""
    twice_differentiated_parameters: set[int] = field(default_factory=set)
    """Indices of parameters that gradients depend on which may be differentiated again (``create_graph``)."""
    transformed_modules: set[str] = field(default_factory=set)
    """Modules that run with their own parameters, at least in part, in a transform of ``torch.func``."""
    host_syncs: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    """Reads of real tensors' values by the host: (number of ops before, modules that were running)."""

    def live_bytes(self) -> list[int]:
        """Return the peak of live bytes during each op, without gradients of parameters."""
        peaks = [0] * len(self.ops)
        live, position = 0, -1
        for op, storage, sign in [*self.events, (len(self.ops) - 1, -1, 0)]:
            while position < op:
                position += 1
                peaks[position] = live
            if storage >= 0 and storage not in self.gradient_storages and storage not in self.planned_storages:
                live += sign * self.storage_bytes[storage]
            if position >= 0 and not self.ops[position].is_accumulation:
                peaks[position] = max(peaks[position], live)
        return peaks


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills a ``Recording``; enter it after (inside of) a FakeTensorMode."""

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], *, free_gradients: bool = False) -> None:
        """Prepare a recording.

        Args:
            module: The module whose submodules are the sites of ops.
            parameters: The parameters that ``Op.used_parameters`` are indices into.
            free_gradients: Whether to drop each gradient of a parameter as soon as it is complete.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._free_gradients = free_gradients
        self.recording = Recording()
        self._names = _visible_names(module)
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._inputs: list[frozenset[int]] = []
        self._site_changes: list[tuple[int, tuple[str, ...]]] = [(0, ())]
        self._in_backward = False
        self._last_site: tuple[str, ...] = ()
        self._specs: dict[TensorSpec, TensorSpec] = {}
        self._live_storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._sum_sources: dict[int, int] = {}
        self._out_of_place_sums: set[int] = set()
        self._made_at: list[int] = []
        self._casts: dict[int, int] = {}
        self._read_storages: set[int] = set()
        self._running = RunningFunction()
        self._parameters = parameters
        self._parameter_storages = [parameter.untyped_storage() for parameter in parameters]
        self._parameter_of: dict[int, tuple[int, ...]] = {}
        # Held, so that no other storage gets the key of a buffer that the step replaces.
        self._buffer_storages = [b.untyped_storage() for b in module.buffers() if b.layout == torch.strided]
        self._buffer_keys = {storage._cdata for storage in self._buffer_storages}
        for index, parameter in enumerate(parameters):
            key = storage_key(parameter)
            self._parameter_of[key] = (*self._parameter_of.get(key, ()), index)

    # -- the current module and phase --------------------------------------------------------------------------------

    @contextmanager
    def record_step(self) -> Iterator[None]:
        """Record aten calls, module calls and gradients until the end of the block."""
        handles = []
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, index))  # type: ignore[no-untyped-call]
                handles.append(handle)
        try:
            # Nodes are numbered by thread, and on CUDA a backward has one of its own: it would belong to no module.
            with torch.autograd.set_multithreading_enabled(False), self._record_calls(), self._running, self:
                yield
        finally:
            for handle in handles:
                handle.remove()
            for index, (parameter, storage) in enumerate(zip(self._parameters, self._parameter_storages, strict=True)):
                if storage_key(parameter) != storage._cdata:  # replaced by ``.data = ...``
                    self.recording.changed_parameters.add(index)

    @contextmanager
    def _record_calls(self) -> Iterator[None]:
        """Record the calls of modules, their hooks included, and which gradients are asked for."""
        call, autograd = nn.Module._call_impl, vars(torch.autograd)
        run_backward = autograd["_engine_run_backward"]

        def recorded_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._push(module, (args, kwargs))
            output, before = None, kept_state(module) if id(module) in self._names else {}
            try:
                output = call(module, *args, **kwargs)  # type: ignore[no-untyped-call]
                return output
            finally:
                self._record_state_changes(module, before)
                self._pop(module, output)

        def recorded_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            wanted = {id(tensor) for tensor in tree_leaves(args[3:4])}
            self.recording.differentiated_parameters.update(
                index for index, parameter in enumerate(self._parameters) if id(parameter) in wanted
            )
            if args[2]:  # create_graph; frozen parameters are not part of a graph
                leaves = {id(leaf) for leaf in leaves_of_graph(outputs)}
                again = (i for i, p in enumerate(self._parameters) if id(p) in leaves or not p.requires_grad)
                self.recording.twice_differentiated_parameters.update(again)
            with self._running:  # within ``Tensor.backward``, as in any function, it is off
                return run_backward(outputs, *args, **kwargs)

        nn.Module._call_impl = recorded_call  # type: ignore[method-assign, assignment]
        autograd["_engine_run_backward"] = recorded_backward
        try:
            yield
        finally:
            nn.Module._call_impl = call  # type: ignore[method-assign]
            autograd["_engine_run_backward"] = run_backward

    @contextmanager
    def mark_backward(self) -> Iterator[None]:
        """Mark all ops in the block as backward, as those of autograd's engine always are."""
        before, self._in_backward = self._in_backward, True
        try:
            yield
        finally:
            self._in_backward = before

    def record_host_sync(self) -> None:
        """Record that the host reads values of a tensor."""
        self.recording.host_syncs.append((len(self.recording.ops), self._current_site()))

    def _push(self, module: nn.Module, inputs: object) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        self._stack.append(name)
        self._starts.append(len(self.recording.ops))
        self._inputs.append(self._serials(inputs))
        self._record_site()
        if self._phase() == "forward":
            self.recording.calls[name] += 1
            if peek_interpreter_stack() is not None and not set(self._parameters).isdisjoint(module.parameters(False)):
                self.recording.transformed_modules.add(name)
        else:
            self.recording.recomputed_modules.add(name)

    def _pop(self, module: nn.Module, output: object) -> None:
        name = self._names.get(id(module))
        if name is not None and self._stack and self._stack[-1] == name:
            self._stack.pop()
            start, inputs = self._starts.pop(), self._inputs.pop()
            self._record_site()
            if self._phase() == "forward":
                stop, outputs = len(self.recording.ops), self._serials(output)
                self.recording.module_calls.append(ModuleCall(name, start, stop, inputs, outputs))

    def _serials(self, values: object) -> frozenset[int]:
        """Return the followed storages of all tensors in a nested structure."""
        return frozenset(self._live_storages[key][0] for key in storage_keys(values) if key in self._live_storages)

    def _record_state_changes(self, module: nn.Module, before: Mapping[str, Any]) -> None:
        if before and self._phase() == "forward":
            attribute = find_changed_attribute(before, kept_state(module), self._read_storages)
            if attribute:
                self.recording.state_changers[self._names[id(module)]] = attribute

    def _record_site(self) -> None:
        self._site_changes.append((next_autograd_node(), tuple(self._stack)))

    def _current_site(self) -> tuple[str, ...]:
        """Return the stack, as one tuple for all ops of a site."""
        return self._site_changes[-1][1]

    def _phase(self) -> Phase:
        return "backward" if self._in_backward or torch._C._current_autograd_node() is not None else "forward"

    def _site_of_node(self, node: int) -> tuple[str, ...]:
        """Return the modules that were running when autograd made ``node``."""
        return self._site_changes[bisect_right(self._site_changes, node, key=itemgetter(0)) - 1][1]

    def _locate(self, phase: Phase) -> tuple[tuple[str, ...], int]:
        """Return site and node of the current op."""
        if phase == "forward" or self._stack:  # With a stack in backward, a module is being recomputed.
            return self._current_site(), next_autograd_node() - 1
        current = torch._C._current_autograd_node()
        node = current._sequence_nr() if current is not None else -1
        if 0 <= node < next_autograd_node():  # Gradient accumulation has no number: it belongs to the node before.
            return self._site_of_node(node), node
        return self._last_site, -1

    # -- aten calls ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in SILENT_NAMESPACES:
            return fake_kernels.dispatch(func, args, kwargs)
        # Autograd adds gradients in place, unless the first is a view (the transposed product of a Linear's weight).
        adds_up = func is aten.add.Tensor and not kwargs and is_in_autograd_engine() and _has_matching_tensors(args)
        op = self._describe(func, args, kwargs, is_accumulation=adds_up and not args[0]._is_view())
        self.recording.ops.append(op)
        if op.phase == "forward" and op.site:
            if func._schema.is_mutable:
                self._record_writes(op.site[-1], written_keys(func, args, kwargs))
            if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
                self.recording.transformed_modules.update(op.site)
        out = fake_kernels.dispatch(func, args, kwargs)
        cast = self._find_cast(op, func, args, out)
        fresh = [self.track(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if cast is not None:
            self.recording.weight_casts[self._live_storages[storage_key(out)][0]] = cast
            self._casts[storage_key(out)] = cast
        if adds_up:
            self._record_gradient_sum(args[0], out, out_of_place=not op.is_accumulation)
        op.is_view = not any(fresh) and not func._schema.is_mutable
        op.flops = count_flops(func, args, kwargs, out)
        return out

    def _describe(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_accumulation: bool) -> Op:
        phase = self._phase()
        site, node = self._locate(phase)
        self._last_site = site
        read = storage_keys((args, dict(kwargs)))
        self._read_storages.update(read)
        used = {p for key in read for p in self._parameter_of.get(key, ())}
        specs = tuple(spec_of(arg, self._specs) for arg in args)
        keywords = tuple((name, spec_of(value, self._specs)) for name, value in sorted(kwargs.items()))
        if is_accumulation:
            func = aten.add_.Tensor
        return Op(func, specs, keywords, phase, site, node, tuple(sorted(used)), 0.0, False, is_accumulation)

    def _find_cast(self, op: Op, func: Any, args: tuple[Any, ...], out: Any) -> int | None:
        """Record how the op reads parameters, and return the index of the one that autocast casts, if it does that."""
        if op.phase == "backward":
            self.recording.read_in_backward.update(op.used_parameters)
            casts = (self._casts[key] for key in storage_keys(args) if key in self._casts)
            self.recording.casts_read_in_backward.update(casts)
        if not op.used_parameters:
            return None
        dtype = self._running.compute_dtype(func, args, out)
        if dtype in (torch.bfloat16, torch.float16):
            for index in op.used_parameters:
                if args[0] is self._parameters[index]:
                    self.recording.cast_dtypes.setdefault(index, set()).add(dtype)
                    self.recording.read_as_is.update(set(op.used_parameters) - {index})
                    return index if func is aten._to_copy.default else None
        self.recording.read_as_is.update(op.used_parameters)
        return None

    def _record_writes(self, module: str, keys: Sequence[int]) -> None:
        """Record that ``module`` changes what has these storages."""
        for name, start in zip(self._stack, self._starts, strict=True):
            if any(self._is_older(key, start) for key in keys):
                self.recording.outside_writers.add(name)
        changed = {index for key in keys for index in self._parameter_of.get(key, ())}
        self.recording.changed_parameters |= changed
        if changed or not self._buffer_keys.isdisjoint(keys):
            self.recording.buffer_writers.add(module)

    def _is_older(self, key: int, op: int) -> bool:
        """Return whether a storage was there before this op."""
        return key not in self._live_storages or self._made_at[self._live_storages[key][0]] < op

    # -- storages -----------------------------------------------------------------------------------------------------

    def track(self, tensor: Tensor) -> bool:
        """Follow the tensor's storage from now on; return True if it was not known before."""
        if tensor.layout != torch.strided:
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live_storages or key in self._parameter_of or key in self._buffer_keys:
            return False
        serial = len(self.recording.storage_bytes)
        self.recording.storage_bytes.append(storage.nbytes())
        self._made_at.append(len(self.recording.ops) - 1)
        self._live_storages[key] = (serial, weakref.ref(storage, partial(self._on_storage_freed, key)))
        self.recording.events.append((len(self.recording.ops) - 1, serial, 1))
        return True

    def _on_storage_freed(self, key: int, _reference: object) -> None:
        serial, _ = self._live_storages.pop(key)
        self._casts.pop(key, None)
        self.recording.events.append((len(self.recording.ops) - 1, serial, -1))

    def _record_gradient_sum(self, first: Tensor, total: Tensor, *, out_of_place: bool) -> None:
        """Record that a sum replaces the first gradient, in its storage or ``out_of_place``."""
        keys = storage_key(first), storage_key(total)
        if all(key in self._live_storages for key in keys):
            before, after = (self._live_storages[key][0] for key in keys)
            self._sum_sources[after] = before
            if out_of_place:
                self._out_of_place_sums.add(after)

    def _record_gradient(self, index: int, parameter: Tensor) -> None:
        """Exclude a complete gradient from live bytes: its parameter accounts for it."""
        made = now = len(self.recording.ops) - 1
        if parameter.grad is not None and parameter.grad.layout == torch.strided:
            live = self._live_storages.get(storage_key(parameter.grad))
            serial = live[0] if live is not None else None
            while serial is not None:
                self.recording.gradient_storages.add(serial)
                made = min(made, self._made_at[serial])
                if serial in self._out_of_place_sums:
                    self._record_coexisting_gradient(serial)
                serial = self._sum_sources.get(serial)
        self.recording.gradients[index] = (made, now)
        if self._free_gradients:
            parameter.grad = None

    def _record_coexisting_gradient(self, serial: int) -> None:
        """Add the copy that lives while a gradient is summed out of place: its parameter accounts for only one."""
        events, sizes = self.recording.events, self.recording.storage_bytes
        index, op = next((i, op) for i, (op, storage, sign) in enumerate(events) if (storage, sign) == (serial, 1))
        events[index:index] = [(op, len(sizes), 1), (op, len(sizes), -1)]
        sizes.append(sizes[serial])
        self._made_at.append(op)


def _has_matching_tensors(args: tuple[Any, ...]) -> bool:
    """Return whether the arguments are two tensors of one shape and dtype."""
    is_pair = len(args) == 2 and all(isinstance(arg, Tensor) for arg in args)
    return is_pair and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype


def _visible_names(module: nn.Module) -> dict[int, str]:
    """Return names of submodules by id, without the root and parametrizations, which run as part of their owner."""
    hidden = {
        id(inner)
        for owner in module.modules()
        if parametrize.is_parametrized(owner)
        for inner in owner.parametrizations.modules()  # type: ignore[union-attr]
    }
    return {id(m): name for name, m in module.named_modules() if name and id(m) not in hidden}
