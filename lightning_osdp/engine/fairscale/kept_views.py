"""Views of weights that outlive what they are views of: a whole weight that gets sharded, or one that was gathered.

An attribute, a list or a closure may hold a view of a weight (``weight[:3]``, ``weight.T``), and autograd, numpy or a
storage object its memory. That is left to them, never freed. Tensors among them follow the parameter from then on, as
if they still shared its memory (``GatheredTensor``), and do share it again when the run is over.
"""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.saved_tensors import count_saved, saved_views, storage_of
from lightning_osdp.state.guarded_functions import let_follow
from lightning_osdp.state.guarded_parameter import Followed, GatheredTensor, LocalShard, guard_of


def _count_users(tensor: Tensor) -> int:
    """Return how many tensors, and holders of a storage object, use the memory of a tensor."""
    num_holders = sys.getrefcount(tensor.untyped_storage()) - 2  # torch itself, and this call
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1 + num_holders  # one is that object


NUM_LOOKS, LOOK_S = 20, 0.0005
"""How often, and how long after each other, users of memory are counted: a thread of gloo forgets it a moment later."""

MAX_VAIN_SEARCHES = 32
"""Searches on CUDA that find nothing, before users of memory that are not Python's are taken for those of a library."""


class KeptViews:
    """The views of one engine's parameters that are kept by others."""

    def __init__(self) -> None:
        self._originals: dict[nn.Parameter, Tensor] = {}
        self._followers: list[weakref.ref[Tensor]] = []
        self._num_vain_searches = 0

    def are_there(self, full: Tensor, storage: int, is_shown: bool) -> bool:
        """Return whether anything but a unit, and what it has saved for a backward pass, uses gathered memory.

        Args:
            full: the memory as a tensor, of which the unit holds one more.
            storage: what tells it from others.
            is_shown: whether the parameter's data are in it.
        """
        if not full.untyped_storage().resizable():
            return True
        if full.is_cuda and self._num_vain_searches >= MAX_VAIN_SEARCHES:
            return False
        num_known = 2 + is_shown + count_saved(storage)
        for _ in range(NUM_LOOKS):
            if _count_users(full) <= num_known:
                return False
            time.sleep(LOOK_S)
        return True

    def part_from(self, parameter: nn.Parameter) -> None:
        """Give a parameter that is about to be sharded memory of its own, if that of now is not to be freed."""
        storage = None if parameter.is_meta else storage_of(parameter)
        if storage is None:
            return
        is_shared = _count_users(parameter) > 1
        if is_shared or parameter.storage_offset() or not parameter.untyped_storage().resizable():
            full, own = parameter.data, parameter.data.clone()
            # Data of another type make torch forget the node to which views pass gradients: they are taken anew.
            parameter.data = own.new_empty(0, dtype=torch.float64)
            parameter.data = own
            if is_shared:
                self._originals[parameter] = full

    def follow_originals(self) -> None:
        """Have views that were taken before parameters were sharded follow them. Once they are guarded."""
        wholes = []
        for parameter, full in self._originals.items():
            guard = guard_of(parameter)
            if guard is None:
                parameter.data = full  # it is not sharded: there is one rank
            else:
                local = guard.local_shard()
                wholes.append(Followed(local, full, local.stamp, is_left=True))
        if wholes:
            self._follow(wholes)
        self._originals.clear()

    def leave(self, parameter: nn.Parameter, full: Tensor, shard: Tensor, own: Collection[Tensor]) -> None:
        """Have views of gathered memory that the parameter has left to them follow it.

        Args:
            parameter: the parameter.
            full: its gathered values.
            shard: its local shard.
            own: tensors of the unit in that memory.
        """
        guard = guard_of(parameter)
        if guard is not None:
            local = LocalShard(guard, shard)
            self._follow([Followed(local, full, local.stamp)], own)

    def _follow(self, wholes: Sequence[Followed], own: Collection[Tensor] = ()) -> None:
        """Find the views of these tensors in all of Python."""
        self._num_vain_searches += 1
        storages, objects = {storage_of(whole.full) for whole in wholes}, gc.get_objects()
        skipped = {id(tensor) for tensor in [*(whole.full for whole in wholes), *own, *saved_views(objects)]}
        self._followers = [ref for ref in self._followers if ref() is not None]
        for held in objects:
            if type(held) is Tensor and id(held) not in skipped and storage_of(held) in storages:
                whole = next((whole for whole in wholes if _is_within(held, whole.full)), None)
                if whole is not None:
                    let_follow(held, whole)
                    self._num_vain_searches = 0
                    self._followers.append(weakref.ref(held))

    def release(self) -> None:
        """Have views share the memory of their parameters again, which are whole now."""
        for ref in self._followers:
            held: Tensor | None = ref()
            if isinstance(held, GatheredTensor):
                parameter, full = held.gathered.local.guard.parameter, held.gathered.full
                held.__class__ = Tensor  # type: ignore[assignment]
                if full.data_ptr() != parameter.data_ptr():
                    parameter.data = full.copy_(parameter.data)
        self._followers.clear()


def _is_within(view: Tensor, full: Tensor) -> bool:
    begin = full.data_ptr()
    return begin <= view.data_ptr() < begin + full.nbytes and view.numel() <= full.numel()
