"""What a unit's forward keeps for the backward pass: its parameters as references, gathered again when they are needed.

Note [the backward is noticed by what it reads]: a hook on a module's result must find the tensors in it, whatever it
is; turns in-place operations on results into errors; and does not see what leaves by another way. Autograd itself knows
better: an operation keeps the tensors that its backward needs, and asks for them when it comes to that. So within a
unit's forward ``SavedTensorHooks`` take what is kept. A view of a gathered parameter costs nothing once the parameter
is resharded, and all backward passes that reach the unit, by any path and as often as they like, gather it again.

Note [hooks of others]: those that are active around a unit, such as activation checkpointing's and offloading's, get
all tensors but the unit's parameters, as they would without it.

Note [differentiated twice]: with ``create_graph`` a backward pass keeps tensors for another one. Each of its nodes that
has read something of a unit runs the rest of its work under the same hooks; autograd restores the hooks of the thread
after each node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_osdp.state.autograd_state import NO_PASS, current_pass, is_in_backward
from lightning_osdp.state.guarded_parameter import without_guards

_autograd = torch._C._autograd


class GatheredValues(NamedTuple):
    """What a parameter's unit gathers of it."""

    parameter: Any
    as_is: bool
    """Whether it is gathered in its own type."""
    is_stand_in: bool = False
    """Whether a tensor of this storage only stands for the values."""


class SavingUnit(Protocol):
    """What the hooks need of a unit."""

    def find_values(self, storage: int) -> GatheredValues | None:
        """Return what has this storage if it is gathered by the unit."""

    def note_saved(self, values: GatheredValues) -> None:
        """Note that a backward pass will read these."""

    def version_of(self, parameter: nn.Parameter) -> int:
        """Return a number that changes when the optimizer, or anybody else, changes the parameter in place."""

    def begin_backward(self) -> None:
        """Gather the parameters, since a backward pass has reached the unit."""

    def unshard_for_backward(self, values: GatheredValues) -> None:
        """Gather one parameter, if it is not."""

    def reshard_after_last_use(self, parameter: nn.Parameter) -> None:
        """Free a parameter that no node of the running backward pass needs any more."""


_num_saved: Counter[int | None] = Counter()
"""By the storage of gathered memory, how many tensors of it are saved."""


class _SavedParameter:
    """A view of a gathered parameter, or all of it."""

    __slots__ = ("last_use_pass", "storage", "unit", "values", "versions", "view")

    def __init__(self, unit: SavingUnit, values: GatheredValues, view: Tensor) -> None:
        if values.is_stand_in:
            view = values.parameter._full_view.data  # whose version no gather changes
        self.unit, self.values, self.versions = unit, values, (view._version, unit.version_of(values.parameter))
        self.view = view.detach()  # of its own: the operator may keep the tensor that autograd hands in
        self.last_use_pass = NO_PASS
        self.storage = storage_of(self.view)
        _num_saved[self.storage] += 1

    def __del__(self) -> None:
        del self.view
        _num_saved[self.storage] -= 1
        if not _num_saved[self.storage]:
            del _num_saved[self.storage]
        # Autograd frees it after the node that has read it, unless the graph is retained.
        if self.last_use_pass != NO_PASS and self.last_use_pass == current_pass():
            self.unit.reshard_after_last_use(self.values.parameter)


def count_saved(storage: int) -> int:
    """Return how many tensors of this memory are saved for backward passes."""
    return _num_saved[storage]


def saved_views(objects: Iterable[Any]) -> Iterator[Tensor]:
    """Return the tensors that those of the objects hold which autograd has saved."""
    return (each.view for each in objects if type(each) is _SavedParameter and hasattr(each, "view"))


class SavedTensorHooks:
    """A pair of hooks for one run of a unit; see the notes above.

    Args:
        unit: the unit that runs.
        pending_uses: by frozen parameter, how often the graph will still ask for it.
    """

    def __init__(self, unit: SavingUnit, pending_uses: dict[nn.Parameter, int]) -> None:
        self.unit = unit
        self._pending_uses = pending_uses
        self._outer: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def push(self) -> None:
        """Take all tensors that autograd saves from now on in this thread."""
        self._outer = _autograd._top_saved_tensors_default_hooks(True)
        _autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)

    @staticmethod
    def pop() -> None:
        """End what the last ``push`` has begun."""
        _autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> Any:
        with without_guards():
            storage = storage_of(tensor)
            values = self.unit.find_values(storage) if storage is not None else None
            if values is not None:
                self.unit.note_saved(values)
                parameter = values.parameter
                if not parameter.requires_grad and not is_in_backward():
                    self._pending_uses[parameter] = self._pending_uses.get(parameter, 0) + 1
                return _SavedParameter(self.unit, values, tensor)
        if self._outer is not None:
            return self._outer[1], self._outer[0](tensor)
        return tensor, tensor._version

    def _unpack(self, saved: Any) -> Tensor:
        if torch.is_grad_enabled() and is_in_backward():  # see Note [differentiated twice]
            SavedTensorHooks(self.unit, self._pending_uses).push()
        self.unit.begin_backward()
        if isinstance(saved, _SavedParameter):
            self.unit.unshard_for_backward(saved.values)
            self._note_use(saved)
            return _check_version(saved.view, saved.versions, self.unit.version_of(saved.values.parameter))
        first, second = saved
        if callable(first):
            tensor: Tensor = first(second)
            return tensor
        return _check_version(first, (second, 0))

    def _note_use(self, saved: _SavedParameter) -> None:
        pending = self._pending_uses.get(saved.values.parameter)
        if pending is not None:
            self._pending_uses[saved.values.parameter] = pending - 1
            saved.last_use_pass = current_pass() if pending <= 1 else NO_PASS


def active_unit() -> SavingUnit | None:
    """Return the unit whose hooks get what autograd saves now; None if there are no hooks, or others."""
    top = _autograd._top_saved_tensors_default_hooks(True)
    hooks = getattr(top[0], "__self__", None) if top is not None else None
    return hooks.unit if isinstance(hooks, SavedTensorHooks) else None


def hook_results(results: Any, first_node: int, begin_backward: Callable[..., None]) -> None:
    """Call ``begin_backward`` when a backward pass comes to a node that made one of the results that can be found.

    Args:
        results: what a unit's forward has returned.
        first_node: sequence number of the first node that it may have made.
        begin_backward: called with the node's gradients.
    """
    nodes = set()
    for leaf in tree_leaves(results):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            # Views get other nodes when they are changed in place. What they are views of keeps its own in the graph.
            base = leaf._base if leaf._is_view() else leaf
            node: Any = base.grad_fn if base is not None else None
            if node is not None and node._sequence_nr() >= first_node:
                nodes.add(node)
    for node in nodes:
        node.register_prehook(begin_backward)


def storage_of(tensor: Tensor) -> int | None:
    """Return what tells the memory of a tensor from that of others; None if it has none of its own."""
    try:
        storage: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse tensors and wrappers have none
        return None
    return storage


def _check_version(tensor: Tensor, saved: tuple[int, int], now: int = 0) -> Tensor:
    """Raise as autograd does without hooks if a saved tensor, or what it was gathered from, was changed in place."""
    if (tensor._version, now) != saved:
        kind, version = f"{tensor.type()} {list(tensor.shape)}", max(tensor._version, saved[0] + now - saved[1])
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{kind}] is at version {version}; expected version {saved[0]} instead"
        )
    return tensor
