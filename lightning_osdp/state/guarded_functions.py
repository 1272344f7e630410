"""What torch's functions do with guarded tensors; see ``guarded_parameter``. All of it runs without guards."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._ops import OpOverloadPacket
from torch.distributed import ReduceOp
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from lightning_osdp.state.first_order import first_order
from lightning_osdp.state.guarded_parameter import (
    Followed,
    GatheredTensor,
    GuardedTensor,
    LocalShard,
    find_local_shard,
    full_shaped,
    guard_behind,
    is_guarded,
    local_shard_of,
    opened,
    without_guards,
)
from lightning_osdp.state.limited_rows import LOOK_UPS, check_limited_rows
from lightning_osdp.state.refused_tracing import refuse_tracers, refuse_wrappers
from lightning_osdp.state.stored_tensor import SHAPE_FUNCTIONS, VALUE_PROPERTIES


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHAPE_PROPERTIES = frozenset({"shape", "ndim", "nbytes"})

_PLAIN_FUNCTIONS = _names(
    "requires_grad_ register_hook register_post_accumulate_grad_hook retain_grad is_floating_point is_complex "
    "is_signed element_size get_device is_inference is_pinned is_shared has_names _is_view is_conj is_neg data_ptr "
    "_is_zerotensor __hash__ __dlpack_device__ result_type can_cast promote_types grad backward record_stream "
    "_has_compatible_shallow_copy_type is_coalesced detach_ _amp_foreach_non_finite_check_and_unscale_"
)
"""Functions that a local shard answers like the full tensor, or that concern the parameter as autograd's leaf."""

_MEMORY_FUNCTIONS = _names("data_ptr is_pinned is_shared record_stream")
"""Those of the plain functions that look at the memory of the local shard."""

_FACTORIES = _names(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_tensor new_empty_strided"
)
"""Functions that make new tensors of the same kind; their first argument's values do not matter."""

_LIKE_OTHER = frozenset({"view_as", "expand_as", "reshape_as", "type_as"})
"""Functions that look at the shape or type of their second argument alone."""

_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"})
"""Functions that return the tensor itself where there is nothing to convert."""

_REFUSED = _names(
    "set_ resize_ resize_as_ storage untyped_storage _typed_storage share_memory_ __dlpack__ __cuda_array_interface__ "
    "swap_tensors"
)
"""Functions that hand out or replace memory, which is only a part of the full tensor."""

_IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _names("add sub mul truediv floordiv mod pow and or xor"))

_ELEMENTWISE = _names("mul_ zero_ neg_ abs_ sign_ div_ clamp_min_ clamp_max_ add_ sub_ lerp_ copy_ addcmul_")
"""Functions in place that run on the shards alone where all their tensors are sharded alike."""


def dispatch(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function of torch, some arguments of which are guarded or gathered tensors."""
    refuse_wrappers(depth=2)
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _access_property(func, name, args)
    first = args[0] if args else None
    if name.startswith(("_foreach_", "_fused_")) and isinstance(first, list | tuple):
        return _run_for_each(func, args, kwargs)
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        refuse_collective([args, kwargs])
    if is_guarded(first):
        if name in SHAPE_FUNCTIONS:  # answered for the full tensor
            return _ask_for_shape(func, name, args, kwargs)
        if name in _FACTORIES:
            return func(full_shaped(local_shard_of(first)), *args[1:], **kwargs)
        if name in _CONVERSIONS:
            shaped = full_shaped(local_shard_of(first))
            if func(shaped, *args[1:], **kwargs) is shaped:
                return first
        if name == "detach":
            return GuardedTensor.create(local_shard_of(first))
        if name in _REFUSED:
            refuse_tracers()
            raise guard_behind(first).refusal(f"{name} needs its memory as a whole")
    elif name in SHAPE_FUNCTIONS and isinstance(first, GatheredTensor):
        return func(*args, **kwargs)
    elif name in _LIKE_OTHER and len(args) == 2 and is_guarded(args[1]):
        return func(first, full_shaped(local_shard_of(args[1])))
    if name == "equal" and len(args) == 2 and args[0].dim() and _shape(args[0]) != _shape(args[1]):
        return False
    if name in ("grad", "backward"):
        _refuse_slices([args, kwargs], is_grad=name == "grad")
    if name in _PLAIN_FUNCTIONS:
        return _run_plain(func, name, args, kwargs)
    return run_on_full(func, name, args, kwargs)


def _refuse_slices(tensors: Any, is_grad: bool) -> None:
    for leaf in tree_flatten(tensors)[0]:
        if is_guarded(leaf) and guard_behind(leaf).is_sliced:
            raise guard_behind(leaf).refusal("autograd knows its slices alone, so its gradient can't be asked for")
        if is_grad and is_guarded(leaf) and guard_behind(leaf).is_cut:
            raise guard_behind(leaf).refusal("it is tensor parallel: autograd knows a slice, for all ranks' samples")


def refuse_collective(tensors: Any) -> None:
    """Refuse tensors of which this rank holds a part, or whose changes would not be noticed, in any container."""
    for leaf in tree_flatten(tensors)[0]:
        local = find_local_shard(leaf)
        if local is not None:
            raise local.guard.refusal("a collective would mix up the ranks' parts of it")


def _run_plain(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    first = args[0] if args else None
    if name.startswith("register_") and is_guarded(first):
        guard = guard_behind(first)
        if guard.is_sliced:
            raise guard.refusal("it runs in slices, which call no hooks of it")
        if guard.is_cut:
            raise guard.refusal("it is tensor parallel, so that hooks of it would see other ranks' samples")
    is_requested = args[1] if len(args) > 1 else kwargs.get("requires_grad", True)
    if name == "requires_grad_" and isinstance(first, GuardedTensor) and is_requested:
        raise guard_behind(first).refusal("what stands for it can't be a leaf of another graph")
    if name in _MEMORY_FUNCTIONS and is_guarded(first):
        return func(local_shard_of(first).tensor, *args[1:], **kwargs)
    if name.startswith("_amp_foreach"):
        gradients = [local_shard_of(t).tensor if isinstance(t, GuardedTensor) else t for t in args[0]]
        func(gradients, *args[1:], **kwargs)
        guard = next(guard_behind(t) for t in args[0] if is_guarded(t))
        guard.context.check_access(guard)
        torch.distributed.all_reduce(args[1], ReduceOp.MAX, guard.context.group)  # an inf on one rank is one on all
        return None
    return func(*args, **kwargs)


def _ask_for_shape(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    shape = _shape(args[0])
    if name == "shape" or (name == "size" and len(args) == 1 and not kwargs):
        return shape
    if name in ("numel", "nelement"):
        return shape.numel()
    if name in ("dim", "ndimension", "ndim"):
        return len(shape)
    return func(torch.empty(shape, dtype=args[0].dtype, device="meta"), *args[1:], **kwargs)


def _shape(tensor: Any) -> torch.Size:
    return guard_behind(tensor).layout.shape if is_guarded(tensor) else tensor.shape


# Properties


def _access_property(func: Any, name: str, args: Any) -> Any:
    attribute, tensor = getattr(func.__self__, "__name__", ""), args[0]
    if not is_guarded(tensor):
        return _access_property_of_gathered(func, name, attribute, args)
    if name == "__get__":
        if attribute == "data":
            return GuardedTensor.create(replace(local_shard_of(tensor), is_data=True))
        if attribute == "grad" and not isinstance(tensor, GuardedTensor):
            return _get_gradient(tensor)
        if attribute in _SHAPE_PROPERTIES:
            return _ask_for_shape(func, attribute, args, {})
        if attribute in VALUE_PROPERTIES:
            return run_on_full(func, attribute, args, {})
    elif name == "__set__" and attribute == "data":
        return _assign_data(tensor, args[1])
    elif name == "__set__" and attribute == "grad":
        return _assign_gradient(tensor, args[1])
    elif name == "__delete__" and attribute == "grad":
        return _assign_gradient(tensor, None)
    elif name == "__set__" and attribute == "requires_grad" and isinstance(tensor, GuardedTensor) and args[1]:
        raise guard_behind(tensor).refusal("what stands for it can't be a leaf of another graph")
    return func(*args)


def _access_property_of_gathered(func: Any, name: str, attribute: str, args: Any) -> Any:
    if name == "__set__" and attribute == "data":
        return run_on_full(Tensor.copy_, "copy_", args, {})
    if name == "__get__" and (attribute == "data" or attribute in VALUE_PROPERTIES):
        return run_on_full(func, attribute, args, {})
    return func(*args)


def _get_gradient(parameter: Any) -> Tensor | None:
    guard = guard_behind(parameter)
    local = guard.local_gradient()
    if local is None or local.tensor.numel() != guard.shard.numel():
        return parameter.grad  # type: ignore[no-any-return]
    known = guard.shown_gradient() if guard.shown_gradient is not None else None
    if known is None or known._local.tensor is not local.tensor:
        known = GuardedTensor.create(local)
        guard.shown_gradient = weakref.ref(known)  # the same object each time, as without sharding
    return known


def _part_of(local: LocalShard, value: Tensor, what: str) -> Tensor:
    """Return this rank's part of a full value that takes the place of ``local``."""
    if is_guarded(value):
        other = local_shard_of(value)
        if other.guard.layout == local.guard.layout and other.tensor.dtype == local.tensor.dtype:
            return other.tensor.view(local.tensor.shape)
        value = other.gather()
    elif isinstance(value, GatheredTensor):
        value.gathered.refresh()
    if (value.shape, value.dtype, value.device) != (local.guard.layout.shape, local.tensor.dtype, local.tensor.device):
        raise local.guard.refusal(
            f"{what} of shape {tuple(value.shape)}, {value.dtype} on {value.device} can't take the place of one of "
            f"shape {tuple(local.guard.layout.shape)}, {local.tensor.dtype} on {local.tensor.device}"
        )
    return local.guard.layout.shard(value).view(local.tensor.shape)


def _assign_data(tensor: Any, value: Tensor) -> None:
    """See Note [assigning data]."""
    local = local_shard_of(tensor)
    local.guard.context.check_access(local.guard)
    part = _part_of(local, value, "data")
    if isinstance(tensor, GuardedTensor):
        with torch.no_grad():
            local.tensor.copy_(part)
    elif part.data_ptr() != local.tensor.data_ptr():
        local.before_write()
        with opened([tensor]):
            local.guard.rebind(part)
    local.guard.num_writes += 1


def _assign_gradient(parameter: Any, value: Tensor | None) -> None:
    guard_behind(parameter).context.before_gradient()
    if value is not None:
        value = _part_of(local_shard_of(parameter), value, "a gradient")
    guard_behind(parameter).set_gradient(value)


# Functions on full tensors


def _run_for_each(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function on lists for one element after the other, so that one full tensor at a time is there."""
    count = len(args[0])
    results: list[Any] = []
    for index in range(count):

        def pick(value: Any, index: int = index) -> Any:
            return [value[index]] if isinstance(value, list | tuple) and len(value) == count else value

        own_args, own_kwargs = [pick(value) for value in args], {key: pick(value) for key, value in kwargs.items()}
        if any(is_guarded(leaf) or isinstance(leaf, GatheredTensor) for leaf in tree_flatten(own_args)[0]):
            result = run_on_full(func, func.__name__, own_args, own_kwargs)
        else:
            result = func(*own_args, **own_kwargs)
        results += result or ()
    return tuple(results) if results else None


class _OutsideRead(torch.autograd.Function):
    """Gathers a parameter outside of its operator; see Note [gradients of reads]."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, local: LocalShard) -> Tensor:
        ctx.guard = local.guard
        return local.gather().data  # of an output that is a view, torch refuses changes in place

    @staticmethod
    @first_order(lambda ctx: ctx.guard.refusal("its gradient is differentiated again, outside of its operator"))
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.guard.store_outside_gradient(gradient)
        return None, None


def let_follow(view: Any, whole: Followed) -> None:
    """Have a view of a full tensor follow the parameter of which that is the whole."""
    view.__class__, view.gathered = GatheredTensor, whole


def gather_for_transform(tensor: Any) -> Tensor:
    """Return the full tensor of a guarded or gathered one that ``torch.func`` is to differentiate or to map over."""
    with without_guards():
        if is_guarded(tensor):
            return _gather(tensor, local_shard_of(tensor), is_changed=False)
        if _is_taken_anew(tensor):
            return _take_anew(tensor)
        tensor.gathered.refresh()
        return tensor.detach() if not tensor.requires_grad else tensor.view_as(tensor)  # type: ignore[no-any-return]


def run_on_full(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a function with full tensors in the place of guarded ones, and write back what it changes."""
    leaves, tree = tree_flatten((args, kwargs))
    first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if _can_run_on_shards(name.removeprefix("_foreach_"), leaves):
        return _run_on_shards(func, leaves, tree)
    changes_first = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    changes_first = changes_first or name in _IN_PLACE_OPERATORS
    gathered: dict[int, tuple[Any, Followed]] = {}  # by the id of what the function gets
    by_original: dict[int, Tensor] = {}
    for index, leaf in enumerate(leaves):
        if is_guarded(leaf):
            if id(leaf) not in by_original:
                local = local_shard_of(leaf)
                full = _gather(leaf, local, is_changed=changes_first and leaf is first)
                by_original[id(leaf)] = full
                gathered[id(full)] = (leaf, Followed(local, full, local.stamp))
            leaves[index] = by_original[id(leaf)]
        elif isinstance(leaf, GatheredTensor):
            if changes_first and leaf is first and leaf.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    "a view of a leaf Variable that requires grad is being used in an in-place operation."
                )
            if _is_taken_anew(leaf):
                leaves[index] = _take_anew(leaf)
                continue
            leaf.gathered.refresh()
            gathered[id(leaf)] = (leaf, leaf.gathered)
    versions = [(leaf, leaf._version) for leaf in leaves if id(leaf) in gathered]
    args, kwargs = tree_unflatten(leaves, tree)
    declared = _declared_changes(func, name, args, kwargs)
    result = func(*args, **kwargs)
    for leaf, version in versions:
        if leaf._version != version or id(leaf) in declared:
            if name in LOOK_UPS:
                check_limited_rows(gathered[id(leaf)][1], leaves)
            gathered[id(leaf)][1].write_back()
    return tree_map(lambda value: _wrap_result(value, gathered), result)


def _declared_changes(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """Return the ids of tensors that a function changes by its schema: some kernels count no versions."""
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, func._overload_names[0])
    schema = getattr(func, "_schema", None)
    if schema is None and name.startswith("_fused_"):
        schema = torch._C._jit_get_schemas_for_operator(f"aten::{name}")[0]
    if schema is None:
        return set()
    by_name = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    changed = [by_name.get(argument.name) for argument in schema.arguments if argument.is_write]
    return set(map(id, tree_flatten(changed)[0]))


def _is_taken_anew(view: GatheredTensor) -> bool:
    """Return whether autograd would pass gradients of a kept view to where the parameter was when it was taken."""
    source = view.gathered
    is_stale = source.is_left or source.stamp != source.local.stamp
    return is_stale and view.requires_grad and torch.is_grad_enabled()


def _take_anew(view: GatheredTensor) -> Tensor:
    """Return the same view of the parameter as it is now, as far as autograd is concerned."""
    local, full = view.gathered.local, view.gathered.full
    whole = _gather(local.guard.parameter, local, is_changed=False)
    if whole.stride() != full.stride():
        raise local.guard.refusal("a view of it was taken that is laid out in another way: take it anew in each step")
    offset = view.storage_offset() - full.storage_offset() + whole.storage_offset()
    return whole.as_strided(view.size(), view.stride(), offset)


def _can_run_on_shards(name: str, leaves: list[Any]) -> bool:
    """Return whether a function in place changes each element by itself, and leaves the shards' padding zero."""
    if name not in _ELEMENTWISE or not is_guarded(leaves[0]):
        return False
    if torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
        return False
    target, *others = [local_shard_of(leaf) if is_guarded(leaf) else leaf for leaf in leaves]
    shards = [other for other in others if isinstance(other, LocalShard)]
    if any(other.guard.layout != target.guard.layout for other in shards):
        return False
    if any(isinstance(other, Tensor) and other.dim() for other in others):
        return False
    if name in ("div_", "clamp_min_", "clamp_max_"):
        number = next((other for other in others if isinstance(other, int | float)), None)
        bounds = {"div_": not shards, "clamp_min_": number is not None and number <= 0}
        return bounds.get(name, number is not None and number >= 0)
    return name in ("mul_", "zero_", "neg_", "abs_", "sign_") or isinstance(others[0], LocalShard)


def _run_on_shards(func: Callable[..., Any], leaves: list[Any], tree: Any) -> Any:
    target = local_shard_of(leaves[0])
    shards = [local_shard_of(leaf).tensor.view(-1) if is_guarded(leaf) else leaf for leaf in leaves]
    target.guard.context.check_access(target.guard)
    target.before_write()
    args, kwargs = tree_unflatten(shards, tree)
    func(*args, **kwargs)
    target.guard.num_writes += 1
    return [leaves[0]] if func.__name__.startswith("_foreach_") else leaves[0]


def _gather(leaf: Any, local: LocalShard, is_changed: bool) -> Tensor:
    if not (torch.is_grad_enabled() and leaf.requires_grad):
        return local.gather()
    if is_changed:  # a leaf as the parameter is one, so that torch itself refuses what it refuses for that
        return local.gather().requires_grad_()
    if local.guard.context.updates_in_backward:
        raise local.guard.refusal(
            "read for the gradient outside of its operator, but may be updated before that gradient is there "
            "(OSDPStrategy(update_in_backward=False) allows it)"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise local.guard.refusal("torch.func would lose the gradient of it: give it the parameter's .detach()")
    anchor = torch.zeros((), requires_grad=True)
    return _OutsideRead.apply(anchor, local)  # type: ignore[no-untyped-call, no-any-return]


def _wrap_result(value: Any, gathered: dict[int, tuple[Any, Followed]]) -> Any:
    """Return what stands for a result: the argument itself, or a view that follows its parameter."""
    if type(value).__module__ == "numpy" and hasattr(value, "setflags"):
        value.setflags(write=False)  # which would not reach the parameter
        return value
    if not isinstance(value, Tensor) or is_guarded(value):
        return value
    if id(value) in gathered:
        return gathered[id(value)][0]
    if type(value) is Tensor and value.layout == torch.strided and not is_functorch_wrapped_tensor(value):
        storage = value.untyped_storage()._cdata
        for _, source in gathered.values():
            if source.full.untyped_storage()._cdata == storage:
                let_follow(value, source)
                return value
    return value
