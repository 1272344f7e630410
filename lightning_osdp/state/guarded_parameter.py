"""Sharded parameters that can't be mistaken for whole ones between the runs of their operators.

While a parameter's data is this rank's local shard, its class is a guarded one: torch hands every function that sees it
to this file. Shapes are those of the full tensor. Values that are read are gathered, and what a function changes is
written back to the shards, so that results are those of an unsharded parameter; every rank has to do the same. What
can't be right raises ``ShardingError``. While its unit has it gathered, or an optimizer updates it, a parameter has its
own class and data again. A ``Parameter`` keeps its identity.

Note [the stand-in]: code that does not ask the class (C++ extensions, for one) sees a tensor of the full shape without
memory instead of the shard: it holds nothing but NaN, and to write to it is an error. Those functions of torch itself
that ask no class are made to do so (``undispatched_functions``).

Note [what is handed out]: ``p.data``, ``p.detach()`` and ``p.grad`` are ``GuardedTensor``, which stand for the shards
as the parameter does and gather when they are used. A view of a gathered tensor (``p[0]``, ``p.T``) is a
``GatheredTensor``: it is written back when it is changed, and gathered again when the parameter has changed since. So
objects that a user holds on to behave as if they shared memory with the parameter.

Note [gradients of reads]: autograd does not know a parameter whose operator is not running. Where gradients are
recorded, a read is the output of a function whose backward averages the gradient over the ranks. This rank's shard of
it is added to ``p.grad`` when the pass is over, since the units put their own gradients there until then.

Note [assigning data]: ``p.data = x`` binds the parameter to new memory, as without sharding: whoever holds the old
``p.data`` still has the old values.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from lightning_osdp.errors import OSDPWarning, ShardingError
from lightning_osdp.state.autograd_state import is_other_thread
from lightning_osdp.state.shard_layout import ShardLayout
from lightning_osdp.state.stored_tensor import StoredTensor, read_values

_GUARD = "_osdp_guard"
"""Attribute of a guarded parameter that holds its ``ShardGuard``."""

without_guards = torch._C.DisableTorchFunctionSubclass
"""Context in which guarded tensors are what they are: local shards. For code that knows them."""


class GuardContext:
    """What the guards of one engine share.

    Args:
        group: the ranks that train together.
        updates_in_backward: whether parameters are updated during the backward pass.
    """

    def __init__(self, group: Any, updates_in_backward: bool = False) -> None:
        self.group = group
        self.updates_in_backward = updates_in_backward
        self.before_access: Callable[[str], None] = lambda name: None
        """Called with a parameter's name before its values are gathered or replaced outside of its operator."""
        self.before_update: Callable[[], None] = lambda: None
        """Called before an optimizer's step, to complete gradients that the strategy has not seen being made."""
        self.before_gradient: Callable[[], None] = lambda: None
        """Called before a gradient is read or replaced, for the same reason."""
        self.num_updates = {False: 0, True: 0}
        """Number of changes to all parameters, and to all gradients."""
        self.optimizer_classes: set[type] = set()
        """Those optimizers whose step is right on local shards, since the plan was made with them."""
        self.with_outside_gradients: set[ShardGuard] = set()
        self.is_accumulating = False
        """Whether gradients of what is replicated are those of this rank, until the last micro-batch."""
        self._pid, self.thread = os.getpid(), get_ident()

    def check_access(self, guard: ShardGuard) -> None:
        """Refuse access that can't reach the other ranks, and let them agree on the others."""
        if os.getpid() != self._pid:
            raise guard.refusal("a process of a DataLoader, or another one that was forked, can't gather it")
        if is_other_thread(self.thread):
            raise guard.refusal("another thread than the one that trains can't gather it")
        self.before_access(guard.name)

    def add_outside_gradients(self) -> None:
        """Add the gradients of reads outside of operators to those of the parameters. Idempotent."""
        for guard in self.with_outside_gradients:
            guard.add_outside_gradient()
        self.with_outside_gradients.clear()


@dataclass(eq=False)
class ShardGuard:
    """The guard of one sharded parameter, which is closed while the data are a local shard.

    Attributes:
        parameter: the parameter.
        layout: how it lies over the ranks.
        name: its name in the module that is trained.
        context: what it shares with other guards.
        drop_gathered: frees what its units have gathered, before it changes.
        rebind: has its units use new memory as its local shard.
        is_sliced: whether its operator runs slice by slice, so that autograd never sees the parameter itself.
        is_cut: whether it is tensor parallel, so that autograd sees a slice of it, with other ranks' samples.
    """

    parameter: nn.Parameter
    layout: ShardLayout
    name: str
    context: GuardContext
    drop_gathered: Callable[[], None]
    rebind: Callable[[Tensor], None]
    is_sliced: bool = False
    is_cut: bool = False
    num_writes: int = 0
    is_removed: bool = False
    shown_gradient: weakref.ref[GuardedTensor] | None = None
    _shard: Tensor | None = None
    _stand_in: Tensor | None = None
    _outside_gradient: Tensor | None = None
    _has_warned: bool = False
    shard_shape: torch.Size = field(init=False)
    _plain_class: type = field(init=False)
    _guarded_class: type = field(init=False)

    def __post_init__(self) -> None:
        self._plain_class, self.shard_shape = type(self.parameter), self.parameter.shape
        self._guarded_class = _guarded_class(self._plain_class)
        setattr(self.parameter, _GUARD, self)
        self.close()

    @property
    def shard(self) -> Tensor:
        """The part of the parameter that this rank holds, while the guard is closed."""
        assert self._shard is not None
        return self._shard

    def open(self) -> None:
        """Give the parameter its own class, and the local shard as data."""
        if self._shard is not None:
            self.parameter.__class__ = self._plain_class
            self.parameter.data, self._shard = self._shard, None

    def close(self, shard: Tensor | None = None) -> None:
        """Guard the parameter, whose data are its local shard unless that is given; see Note [the stand-in]."""
        if self.is_removed or self._shard is not None:
            return
        self._shard = shard = self.parameter.data if shard is None else shard
        if self._stand_in is None or (self._stand_in.dtype, self._stand_in.device) != (shard.dtype, shard.device):
            self._stand_in = full_shaped(LocalShard(self, shard))
        self.parameter.data = self._stand_in
        self.parameter.__class__ = self._guarded_class

    def remove(self) -> None:
        """Make the parameter an ordinary one, for good."""
        self.is_removed = True
        self.open()
        delattr(self.parameter, _GUARD)

    def refusal(self, reason: str) -> ShardingError:
        """Return the error that says what can't be done with the parameter outside of its operator."""
        module, _, own = self.name.rpartition(".")
        return ShardingError(
            f"{own} of {module or 'the module'} is sharded, and {reason}: use it within "
            "trainer.strategy.summon_full_params(), on all ranks"
        )

    def local_shard(self) -> LocalShard:
        """Return the part of the parameter that this rank holds."""
        return LocalShard(self, self.shard)

    def local_gradient(self) -> LocalShard | None:
        """Return the part of the gradient that this rank holds, if there is one."""
        self.context.before_gradient()
        self.add_outside_gradient()
        with without_guards():
            gradient = self.parameter.grad
        return None if gradient is None else LocalShard(self, gradient, "gradient")

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Give the parameter a gradient that lies like its local shard, and forget that of reads elsewhere."""
        self._outside_gradient = None
        with opened([self.parameter]):
            self.parameter.grad = gradient

    def store_outside_gradient(self, gradient: Tensor) -> None:
        """Average a full gradient over the ranks and add this rank's part to the parameter's when the pass is over."""
        if not self._has_warned:
            self._has_warned = True
            if dist.get_rank(self.context.group) == 0:
                warnings.warn(
                    f"the training step reads {self.name} outside of its operator, which it did not when it was "
                    "traced: the weight is gathered once more, in memory that the plan did not count",
                    OSDPWarning,
                    stacklevel=2,
                )
        full = gradient.detach().to(self.parameter.dtype).clone(memory_format=torch.contiguous_format)
        self.context.before_access(self.name)  # other ranks may have come to other collectives of the pass
        dist.all_reduce(full, group=self.context.group)
        part = self.layout.shard(full.div_(dist.get_world_size(self.context.group)))
        self._outside_gradient = part if self._outside_gradient is None else self._outside_gradient.add_(part)
        self.context.with_outside_gradients.add(self)

    def add_outside_gradient(self) -> None:
        """Add the gradient of reads outside of the operator to the parameter's."""
        part, self._outside_gradient = self._outside_gradient, None
        if part is not None:
            with torch.no_grad(), without_guards(), opened([self.parameter]):
                part = part.view(self.parameter.shape)
                self.parameter.grad = part if self.parameter.grad is None else self.parameter.grad.add_(part)


@dataclass
class LocalShard:
    """What one rank holds of a parameter, or of what lies like it: its gradient, an optimizer's state.

    Attributes:
        guard: the parameter's guard.
        tensor: this rank's part.
        kind: empty for the parameter itself; "gradient", or the name of a state.
        is_data: whether it is the parameter's ``data``, whose changes autograd does not count.
    """

    guard: ShardGuard
    tensor: Tensor
    kind: str = ""
    is_data: bool = False

    @property
    def stamp(self) -> tuple[int, int]:
        """Two numbers that change whenever the values do."""
        return self.guard.num_writes, self.guard.context.num_updates[self.kind == "gradient"]

    def gather(self) -> Tensor:
        """Return the full tensor. Collective."""
        self._check_guard()
        is_partial = self.kind == "gradient" and self.guard.is_sliced and self.guard.context.is_accumulating
        if is_partial and any(group is None for group in self.guard.layout.groups):
            raise self.guard.refusal("its replicated slices have gradients of this rank until the last micro-batch")
        self.guard.context.check_access(self.guard)
        # A transform of torch.func, or inference mode, would take these for its own tensors.
        with temporarily_clear_interpreter_stack(), torch.inference_mode(False):
            return self.guard.layout.unshard(self.tensor)

    def write(self, full: Tensor) -> None:
        """Store this rank's part of the full tensor."""
        self._check_guard()
        self.before_write()
        with torch.no_grad():
            self.tensor.copy_(self.guard.layout.shard(full).view(self.tensor.shape))
        self.guard.num_writes += 1

    def before_write(self) -> None:
        """Free what is gathered of the parameter before it changes, and let autograd know."""
        if not self.kind:
            self.guard.drop_gathered()
            if not self.is_data:
                torch.autograd.graph.increment_version(self.guard.parameter)

    def _check_guard(self) -> None:
        if self.guard.is_removed:
            raise ShardingError(
                f"this tensor is of {self.guard.name} as it was sharded before the plan changed or the run ended: take "
                "it anew"
            )


@dataclass
class Followed:
    """A full tensor that stands for a shard, with the state of the parameter that it shows."""

    local: LocalShard
    full: Tensor
    stamp: tuple[int, int]
    is_left: bool = False
    """Whether it is memory that a parameter had before it was sharded, so that autograd does not know who shares it."""

    def refresh(self) -> None:
        """Gather again if the parameter has changed since. Collective."""
        if self.stamp == self.local.stamp:
            return
        with torch.no_grad():
            self.full.copy_(self.local.gather())
        self.stamp = self.local.stamp

    def write_back(self) -> None:
        """Store what was changed in the full tensor."""
        self.local.write(self.full)
        self.stamp = self.local.stamp


class ValuesOnDemand:
    """A parameter whose unit runs, but has not gathered it as it is; it is asked before guarded ones are."""

    __slots__ = ()

    def show_values(self) -> None:
        """Have the unit gather the parameter, which is an ordinary one then."""
        raise NotImplementedError


class _Dispatched:
    """A tensor whose functions ``guarded_functions`` runs, and whose copies are ordinary tensors."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See ``guarded_functions.dispatch``."""
        if StoredTensor in types:
            read_values(args, kwargs)
        if any(issubclass(kind, ValuesOnDemand) for kind in types):
            return NotImplemented
        with without_guards():
            return guarded_functions.dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self._full_copy()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._full_copy().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _full_copy(self) -> Tensor:
        raise NotImplementedError


class _Guarded(_Dispatched):
    """A tensor that stands for a full one of which this rank holds a part."""

    __slots__ = ()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with without_guards():
            local = local_shard_of(self)
            kind = f"{local.kind} of " if local.kind else ""
            return f"<{kind}{local.guard.name}, {tuple(local.guard.layout.shape)}, {local.tensor.dtype}, sharded>"

    def __copy__(self) -> Any:
        raise guard_behind(self).refusal("a shallow copy would have no memory in common with it")

    def _full_copy(self) -> Tensor:
        with without_guards(), torch.no_grad():
            full = local_shard_of(self).gather().clone()
            return nn.Parameter(full, self.requires_grad) if isinstance(self, nn.Parameter) else full


class GuardedTensor(_Guarded, Tensor):  # type: ignore[misc]
    """What ``data``, ``detach`` and ``grad`` of a guarded parameter return. Its own memory is one NaN."""

    _local: LocalShard

    @classmethod
    def create(cls, local: LocalShard) -> GuardedTensor:
        """Return a tensor of the full shape that stands for a local shard."""
        tensor = full_shaped(local)
        tensor.__class__ = cls
        tensor._local = local  # type: ignore[attr-defined]
        return tensor  # type: ignore[return-value]


class GatheredTensor(_Dispatched, Tensor):
    """A gathered tensor, or a view of one, that follows its parameter; see Note [what is handed out]."""

    gathered: Followed

    def _full_copy(self) -> Tensor:
        with without_guards():
            self.gathered.refresh()
            return self.detach().clone()


def full_shaped(local: LocalShard) -> Tensor:
    """Return a tensor of the full shape without memory and without values, to which nothing can be written."""
    value = local.tensor.new_full((), float("nan"))
    torch._C._set_throw_on_mutable_data_ptr(value)
    return value.expand(local.guard.layout.shape)


def guard_behind(tensor: Any) -> ShardGuard:
    """Return the guard of the parameter that a guarded tensor is, or is a part or gradient of."""
    guard: ShardGuard = tensor._local.guard if isinstance(tensor, GuardedTensor) else getattr(tensor, _GUARD)
    return guard


def local_shard_of(tensor: Any) -> LocalShard:
    """Return what this rank holds of a guarded tensor."""
    return tensor._local if isinstance(tensor, GuardedTensor) else guard_behind(tensor).local_shard()


def local_data(parameter: Tensor) -> Tensor:
    """Return what this rank holds of a parameter, guarded or not."""
    return guard_behind(parameter).shard if is_guarded(parameter) else parameter.data


def find_local_shard(tensor: Any) -> LocalShard | None:
    """Return what this rank holds of a tensor that is guarded or shows a gathered one; None for any other."""
    if isinstance(tensor, GatheredTensor):
        return tensor.gathered.local
    return local_shard_of(tensor) if isinstance(tensor, _Guarded) else None


def gather(tensor: GuardedTensor) -> GatheredTensor:
    """Return the full tensor now, and let it follow its parameter. Collective."""
    with without_guards(), torch.no_grad():
        local = local_shard_of(tensor)
        full = local.gather()
        view: Any = full.view_as(full)  # another object, since a cycle would hold the memory longer
        view.__class__, view.gathered = GatheredTensor, Followed(local, full, local.stamp)
        return view  # type: ignore[no-any-return]


def guard_of(parameter: Tensor) -> ShardGuard | None:
    """Return the guard of a parameter, open or closed, if it has one."""
    return vars(parameter).get(_GUARD)


def is_guarded(tensor: Any) -> bool:
    """Return whether a tensor stands for one of which this rank holds a part."""
    return isinstance(tensor, _Guarded)


@contextmanager
def opened(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Give guarded parameters their own class, and so their local shards as data, within a context."""
    guards = [getattr(parameter, _GUARD) for parameter in parameters if isinstance(parameter, _Guarded)]
    for guard in guards:
        guard.open()
    try:
        yield
    finally:
        for guard in guards:
            guard.close()


@cache
def _guarded_class(plain_class: type) -> type:
    return type(f"Guarded{plain_class.__name__}", (_Guarded, plain_class), {})


from lightning_osdp.state import guarded_functions  # noqa: E402
