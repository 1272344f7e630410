"""How a unit gathers and frees its parameters, and what they show meanwhile.

Between runs a parameter shows its shard, or is guarded; while its unit runs it shows its full values, or hands out
casts of them (``low_precision``); and where autograd only asks for its shape, it shows that without values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_osdp.engine.fairscale.low_precision import (
    GatheredCast,
    is_autocast_to,
    show_cast,
    show_plain,
    shows_cast,
)
from lightning_osdp.engine.fairscale.saved_tensors import GatheredValues, storage_of
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import guard_of, opened, without_guards

ShardedParameter: TypeAlias = Any
"""A ``Parameter`` with FairScale's attributes; ``_full_view``, its values if they are there; ``_full_storage``."""


class UnitParameters:
    """The part of a unit that gathers its parameters, each as a cast or as it is; see ``low_precision``.

    Backward passes gather what autograd has saved. A parameter of which nothing is saved is gathered as well if the
    traced backward reads it, since an operation may keep it by itself.
    """

    params: Any
    world_size: int
    rank: int
    reshard_after_forward: bool
    param_indices: Any
    _context: Any
    _coalesced_gather: Any
    _is_prefetched: bool
    _index: int
    _num_running: int
    _streams: Any
    _finished: Any
    _lazy_init: Any

    def _prepare_parameters(
        self, compute_dtypes: Mapping[nn.Parameter, torch.dtype], not_read_in_backward: Collection[nn.Parameter]
    ) -> None:
        self._compute_dtypes, self._not_read_in_backward = compute_dtypes, not_read_in_backward
        self._casts: dict[nn.Parameter, GatheredCast] = {}
        self._casts_of_run: dict[tuple[nn.Parameter, bool], Tensor] = {}
        self._unread_casts: dict[nn.Parameter, int] = {}
        self._shown_in_full: set[nn.Parameter] = set()
        self._read_as_is: list[ShardedParameter] = []
        self._gathered: set[tuple[nn.Parameter, bool]] = set()
        """What is gathered or on its way: parameters, and whether in their own type."""
        self._saved: set[tuple[nn.Parameter, bool]] = set()
        self._values_by_storage: dict[int, GatheredValues] = {}
        self._context.gather_memory.add_unit(
            sum(p._orig_size.numel() * compute_dtypes.get(p, p.dtype).itemsize for p in self.params)
        )
        self._context.reducer.memory.add_unit(sum(map(self._reduced_bytes, self.params)))
        self._as_is_index = self._context.order.register(_AsIs(self)) if compute_dtypes else self._index

    def _reduced_bytes(self, parameter: ShardedParameter) -> int:
        """Return the bytes of a gradient while it is reduced: its own, and those of a copy in another type."""
        dtype = self._context.reducer.dtype or parameter.dtype
        sizes = {parameter.dtype: parameter.dtype.itemsize, dtype: dtype.itemsize}
        return int(parameter._orig_size.numel() * sum(sizes.values())) if parameter.requires_grad else 0

    def _init_param_attributes(self, p: ShardedParameter) -> None:
        if hasattr(p, "_fp32_shard"):
            return
        with opened([p]):
            super()._init_param_attributes(p)  # type: ignore[misc]
        if not p._is_sharded:
            return
        self._view_memory(p)
        if p in self._compute_dtypes:
            cast = self._casts[p] = GatheredCast(p, self._compute_dtypes[p], self.world_size)
            stand_in = cast.stand_in.untyped_storage()
            self._values_by_storage[cast.storage._cdata] = GatheredValues(p, as_is=False)
            self._values_by_storage[stand_in._cdata] = GatheredValues(p, as_is=True, is_stand_in=True)

    def _view_memory(self, p: ShardedParameter) -> None:
        storage = p._full_param_padded.untyped_storage()
        storage.resize_(p._full_param_padded.nbytes)
        p._full_view = p._full_param_padded[: p._orig_size.numel()].view(p._orig_size)
        storage.resize_(0)
        p._full_storage = storage._cdata
        self._values_by_storage[p._full_storage] = GatheredValues(p, as_is=True)

    # What is gathered

    def find_values(self, storage: int) -> GatheredValues | None:
        """Return what has this storage if it is gathered by the unit."""
        return self._values_by_storage.get(storage)

    def _copy_views(self, results: Any) -> Any:
        """Return the results of a run, with copies of views of gathered memory, which does not outlive the run."""
        if self._num_running > 1:
            return results
        with without_guards():
            views = {id(t) for t in tree_leaves(results) if isinstance(t, Tensor) and self._is_view(t)}
            return tree_map(lambda leaf: leaf.clone() if id(leaf) in views else leaf, results) if views else results

    def _is_view(self, tensor: Tensor) -> bool:
        return tensor not in self.param_indices and storage_of(tensor) in self._values_by_storage

    def _has_views(self, parameter: ShardedParameter) -> bool:
        is_shown = storage_of(parameter) == parameter._full_storage
        return bool(self._context.views.are_there(parameter._full_param_padded, parameter._full_storage, is_shown))

    def _leave_to_views(self, parameter: ShardedParameter) -> None:
        """Leave gathered memory to views that outlive it, as an attribute, and have them follow the parameter."""
        padded, view = parameter._full_param_padded, parameter._full_view
        is_shown = storage_of(parameter) == parameter._full_storage
        if padded.is_cuda:
            padded.record_stream(torch.cuda.current_stream())
        del self._values_by_storage[parameter._full_storage]
        with torch.inference_mode(False), torch.no_grad():
            parameter._full_param_padded = torch.empty_like(padded)
            self._view_memory(parameter)
        if is_shown:
            parameter.data = parameter._full_view
        self._context.views.leave(parameter, view, parameter._fp32_shard, [padded])

    def note_saved(self, values: GatheredValues) -> None:
        """Note that a backward pass will read these."""
        self._saved.add((values.parameter, values.as_is))

    def _gather(self, params: Sequence[ShardedParameter], as_is: bool = False) -> list[ShardedParameter]:
        """Gather those of the parameters that are not, and return them. Collective.

        Args:
            params: parameters of the unit.
            as_is: whether all are gathered in their own type, and not as casts where there are any.
        """
        if as_is and self._casts:
            self._coalesced_gather.wait()  # casts may be on their way
        is_started = self._coalesced_gather.is_started
        missing = [p for p in params if is_started or not self._is_gathered(p, as_is)]
        if not missing or self.world_size == 1:
            return []
        indices = [self.param_indices[p] for p in missing] if len(missing) < len(self.params) else ()
        self._context.order.before_gather(self._as_is_index if as_is else self._index, is_in_backward(), indices)
        try:
            with self._use_stream("all_gather"):
                tensors = ([], []) if is_started else self._outputs_and_shards(missing, as_is)
                self._coalesced_gather.gather(*tensors)
        except BaseException:  # what has no values must not count as gathered
            self._free(missing)
            raise
        self._context.order.prefetch_next()
        return missing

    def _is_gathered(self, parameter: ShardedParameter, as_is: bool) -> bool:
        return (parameter, as_is or parameter not in self._casts) in self._gathered

    @contextmanager
    def _use_stream(self, name: str) -> Iterator[None]:
        cuda = fairscale_module.torch.cuda
        if name != "all_gather":  # which depends on no compute
            self._streams[name].wait_stream(cuda.current_stream())
        with torch.no_grad(), cuda.stream(self._streams[name]):
            yield
        cuda.current_stream().wait_stream(self._streams[name])

    def _outputs_and_shards(self, params: Sequence[ShardedParameter], as_is: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return what to gather into, and what to gather."""
        outputs = []
        for p in params:
            cast = None if as_is else self._casts.get(p)
            self._context.gather_memory.take_back(self._storage_of(p, cast is None))
            self._gathered.add((p, cast is None))
            outputs.append(cast.allocate() if cast is not None else _allocate(p))
        return _of_one_type(outputs), self._shards(params, as_is)

    def _storage_of(self, parameter: ShardedParameter, as_is: bool) -> torch.UntypedStorage:
        if not as_is:
            return self._casts[parameter].storage
        full: Tensor = parameter._full_param_padded
        return full.untyped_storage()

    def _shards(self, params: Sequence[ShardedParameter], as_is: bool) -> list[Tensor]:
        """Return this rank's parts of parameters, in the type in which they are gathered."""
        casts = [None if as_is else self._casts.get(p) for p in params]
        pairs = zip(params, casts, strict=True)
        return _of_one_type([cast.cast_shard() if cast is not None else p._fp32_shard for p, cast in pairs])

    def start_prefetch(self) -> None:
        """Start to gather the parameters if the unit is prefetched and they are not there or on their way."""
        if self._is_prefetched and not self._coalesced_gather.is_started and not self.has_unsharded_params:
            with without_guards(), torch.no_grad():
                self._lazy_init()  # if only other ranks have run it
                self._coalesced_gather.start(*self._outputs_and_shards(self.params, as_is=False))

    def _gather_for_backward(self) -> None:
        """Gather what the running backward pass will read, and show it."""
        awaited = [p for p in self.params if p not in self._finished]
        read = [p for p in awaited if self._reads_in_backward(p)]
        self._gather(read)
        read_as_is = [p for p in awaited if p in self._casts and (p, True) in self._saved]
        if read_as_is:
            self._gather(read_as_is, as_is=True)
        self._use_full_params([p for p in read if p not in self._casts] + read_as_is)

    def _reads_in_backward(self, parameter: ShardedParameter) -> bool:
        if parameter in self._casts:
            return (parameter, False) in self._saved
        return parameter not in self._not_read_in_backward or (parameter, True) in self._saved

    @property
    def has_unsharded_params(self) -> bool:
        """Return whether any parameter is gathered now; after a backward pass, those that it did not reach are."""
        return bool(self._gathered)

    def _free_full_params(self, params: Any = None) -> None:
        params = self.params if params is None else params
        if self._num_running or not params:
            return
        self._coalesced_gather.wait()
        with without_guards():
            self._free(params)

    def _free(self, params: Sequence[ShardedParameter]) -> None:
        for parameter in params:
            for as_is in (False, True):
                if (parameter, as_is) not in self._gathered:
                    continue
                self._gathered.discard((parameter, as_is))
                if as_is and self._has_views(parameter):
                    self._leave_to_views(parameter)
                else:
                    self._context.gather_memory.free(self._storage_of(parameter, as_is))

    # What parameters show

    @property
    def is_in_autocast(self) -> bool:
        """Return whether autocast is on, in the type of the casts."""
        return is_autocast_to(next(iter(self._compute_dtypes.values())), self._context.device)

    def _reads_casts(self) -> bool:
        """Return whether a run that begins now reads casts; a run within one that does not reads what that one does."""
        if not self._casts or not self.is_in_autocast or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        return not any(p in self._shown_in_full and not shows_cast(p) for p in self._casts)

    def cast_of(self, parameter: ShardedParameter) -> Tensor:
        """Return the gathered cast, for the run of the unit."""
        key = parameter, torch.is_grad_enabled()
        if key not in self._casts_of_run:
            if key[1] and not is_in_backward():
                self._unread_casts[parameter] = self._unread_casts.get(parameter, 0) + 1
            self._casts_of_run[key] = self._casts[parameter].read(partial(self._on_cast_unread, parameter))
        return self._casts_of_run[key]

    def read_rows(self, parameter: ShardedParameter, ids: Tensor, padding_idx: int | None, scaled: bool) -> Tensor:
        """Return rows of the gathered cast in the parameter's type."""
        return self._casts[parameter].read_rows(ids, partial(self._free_unread_cast, parameter), padding_idx, scaled)

    def _on_cast_unread(self, parameter: ShardedParameter) -> None:
        """Free a cast in the backward of its last run, before its gradient is cast."""
        self._unread_casts[parameter] = self._unread_casts.get(parameter, 0) - 1
        self._free_unread_cast(parameter)

    def _free_unread_cast(self, parameter: ShardedParameter) -> None:
        if self._unread_casts.get(parameter, 0) == 0:
            with without_guards():
                self._free_full_params([parameter])

    def read_as_is(self, parameter: ShardedParameter) -> None:
        """Gather the parameter in its own type, which it shows for the rest of the run."""
        with without_guards():
            self._read_as_is += self._gather([parameter], as_is=True)
            show_plain(parameter)
            parameter.data = parameter._full_view

    def _use_full_params(self, params: Sequence[ShardedParameter] | None = None, as_casts: bool = False) -> None:
        """Show the full shape of parameters, and their values if they are gathered; or have them hand out casts."""
        for parameter in self.params if params is None else params:
            if parameter not in self._shown_in_full:
                self._shown_in_full.add(parameter)
                guard = guard_of(parameter)
                if guard is not None:
                    guard.open()
                if as_casts and parameter in self._casts:
                    show_cast(parameter, self, self._casts[parameter])
                else:
                    parameter.data = parameter._full_view

    def _use_fp32_param_shard(self, params: Sequence[ShardedParameter] | None = None) -> None:
        """Show this rank's part of parameters, unless the unit is running."""
        if self._num_running:
            return
        for parameter in self.params if params is None else params:
            if parameter in self._shown_in_full:
                self._shown_in_full.discard(parameter)
                show_plain(parameter)
                guard = guard_of(parameter)
                if guard is None:
                    parameter.data = parameter._fp32_shard
                else:
                    guard.close(parameter._fp32_shard)

    def _keep_changes(self, versions: Sequence[int], has_hooks: bool) -> None:
        """Write this rank's part of parameters back that a hook or the operator itself has changed."""
        for parameter, version in zip(self.params, versions, strict=True):
            if not shows_cast(parameter):  # else nothing has asked for its memory
                self._keep_change(parameter, has_hooks or parameter._version != version)  # ``.data`` counts none

    def _keep_change(self, parameter: ShardedParameter, is_changed: bool) -> None:
        """Write this rank's part of a parameter back, if it is changed in place or has got other memory."""
        full, shard = parameter._full_view, parameter._fp32_shard
        is_assigned = parameter.data_ptr() != full.data_ptr()
        if is_assigned:
            full.copy_(parameter.data)
        if is_assigned or is_changed:
            begin = self.rank * shard.numel()
            shard.view(-1).copy_(parameter._full_param_padded[begin : begin + shard.numel()])

    def adopt_shards(self) -> None:
        """Use the data that parameters have now as their local shards."""
        for parameter in self.params:
            if hasattr(parameter, "_fp32_shard"):
                parameter._fp32_shard = parameter.data


class _AsIs:
    """The gathers of a unit's parameters in their own type, where it usually gathers casts, in the agreed order."""

    def __init__(self, unit: Any) -> None:
        self._unit, self.describe = unit, unit.describe
        self.join_reduction, self.can_run = unit.join_reduction, unit.can_run
        self.exchanges_gradients = unit.exchanges_gradients

    @property
    def label(self) -> str:
        """Name of the unit."""
        return str(self._unit.label)

    def join_gather(self, indices: Sequence[int]) -> None:
        """Take part in a gather, and free the result."""
        self._unit.join_gather(indices, as_is=True)

    def start_prefetch(self) -> None:
        """Start nothing: that casts are not enough is found when the parameter is read."""


def _allocate(parameter: ShardedParameter) -> Tensor:
    output: Tensor = parameter._full_param_padded
    if output.untyped_storage().size() == 0:  # to resize to the same size would move it
        output.untyped_storage().resize_(output.nbytes)
    return output


def _of_one_type(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors, as bytes if they are of several types: a collective takes one."""
    return tensors if len({tensor.dtype for tensor in tensors}) == 1 else [each.view(torch.uint8) for each in tensors]
