"""Functions of torch that ask no class of tensors, taught to ask the guarded ones.

torch hands nearly all of its functions to the class of their arguments (``guarded_functions``). Those here would take
a guarded tensor's stand-in for its values, which is NaN, or exchange a part for the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch._dynamo
import torch.distributed.distributed_c10d as c10d
import torch.utils.dlpack
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch._functorch import utils as functorch_utils
from torch.autograd import graph
from torch.jit import _builtins as jit_builtins
from torch.jit import _recursive as jit_compiler
from torch.utils import _device

from lightning_osdp.errors import ShardingError
from lightning_osdp.state.guarded_functions import gather_for_transform, refuse_collective, run_on_full
from lightning_osdp.state.guarded_parameter import ValuesOnDemand, _Dispatched, guard_behind, is_guarded, without_guards
from lightning_osdp.state.refused_tracing import TRACING_REFUSED

_is_prepared = False


def ask_guarded_classes() -> None:
    """Have these functions gather guarded tensors, or refuse them. Once for the process."""
    global _is_prepared
    if _is_prepared:
        return
    _is_prepared = True
    _device._device_constructors()  # and torch's own tables of functions, which hold the originals
    for name in ("tensor", "as_tensor", "asarray"):
        original = getattr(torch, name)
        setattr(torch, name, _on_full(original))
        jit_builtins._register_builtin(getattr(torch, name), f"aten::{name}")
    Tensor.as_subclass = _on_full(Tensor.as_subclass)  # type: ignore[method-assign]
    Tensor.set_ = _assigned(Tensor.set_)  # type: ignore[method-assign]
    for name in ("__new__", "new_tensor"):
        setattr(Tensor, name, _on_full(getattr(Tensor, name), first=1))
    for owner, name in ((torch, "to_dlpack"), (torch.utils.dlpack, "to_dlpack"), (torch.utils, "swap_tensors")):
        setattr(owner, name, _refused(getattr(owner, name)))
    for module, name in (
        (eager_transforms, "_wrap_for_grad"),
        (eager_transforms, "_wrap_functional_tensor"),
        (vmap, "_add_batch_dim"),
    ):
        setattr(module, name, _on_gathered_first(getattr(module, name)))
    graph._get_grad_fn_or_grad_acc = _of_leaf(graph._get_grad_fn_or_grad_acc)
    functorch_utils.unwrap_dead_wrappers = _on_gathered_all(functorch_utils.unwrap_dead_wrappers)
    capture = sys.modules.get("torch._dynamo.functional_export")  # not in all releases
    captures = ("dynamo_graph_capture_for_export", "_dynamo_graph_capture_for_export")
    for maker in (torch, jit_compiler, torch._dynamo, capture):
        for name in ("create_script_module", "compile", "export", *captures):
            if hasattr(maker, name) and callable(getattr(maker, name)):
                setattr(maker, name, _of_whole_modules(getattr(maker, name)))
    c10d._check_single_tensor = _without_collectives(c10d._check_single_tensor)
    c10d._check_tensor_list = _without_collectives(c10d._check_tensor_list)


def _on_full(function: Callable[..., Any], first: int = 0) -> Callable[..., Any]:
    """Return a function that gets full tensors in the place of guarded arguments, from number ``first`` on."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _show_values((*args, *kwargs.values()))
        if not any(isinstance(value, _Dispatched) for value in (*args[first:], *kwargs.values())):
            return function(*args, **kwargs)
        with without_guards():
            return run_on_full(function, function.__name__, args, kwargs)

    return run


def _show_values(arguments: Iterable[Any]) -> None:
    for value in arguments:
        if isinstance(value, ValuesOnDemand):
            value.show_values()


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _show_values(args)
        for value in args:
            if is_guarded(value):
                raise guard_behind(value).refusal(f"{function.__name__} needs its memory as a whole")
        return function(*args, **kwargs)

    return run


def _assigned(set_: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``set_`` that gives a guarded parameter the values of another tensor, as parametrizations do."""
    refused = _refused(set_)

    @wraps(set_)
    def run(*args: Any, **kwargs: Any) -> Any:
        target, *sources = args
        is_assigned = is_guarded(target) and isinstance(target, nn.Parameter) and len(sources) == 1 and not kwargs
        if not is_assigned or not isinstance(sources[0], Tensor):
            return refused(*args, **kwargs)
        if sources[0] is not target:
            target.data = sources[0]
        return target

    return run


def _of_leaf(find_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return what finds the node of autograd that a parameter's gradient comes to, whether or not it is guarded."""

    @wraps(find_node)
    def run(tensor: Any) -> Any:
        if is_guarded(tensor):
            guard = guard_behind(tensor)
            if guard.is_sliced or guard.is_cut:
                raise guard.refusal("autograd knows a slice of it, not the parameter itself")
            with without_guards():
                return find_node(tensor)
        return find_node(tensor)

    return run


def _on_gathered_first(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(tensor: Any, *args: Any) -> Any:
        _show_values((tensor,))
        return function(gather_for_transform(tensor) if isinstance(tensor, _Dispatched) else tensor, *args)

    return run


def _on_gathered_all(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return what prepares the arguments of ``torch.autograd.Function.apply``, which asks no class."""

    @wraps(prepare)
    def run(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args = prepare(args)
        if not any(isinstance(value, _Dispatched) for value in args):
            return args
        return tuple(gather_for_transform(value) if isinstance(value, _Dispatched) else value for value in args)

    return run


def _without_collectives(check: Callable[..., None]) -> Callable[..., None]:
    def check_and_refuse(param: Any, param_name: str) -> None:
        _show_values([param] if isinstance(param, Tensor) else param)
        refuse_collective(param)
        check(param, param_name)

    return check_and_refuse


def _of_whole_modules(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes a program of a module without running it as it is."""

    @wraps(create)
    def run(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get("model")
        target = getattr(target, "__wrapped__", target)
        target = getattr(target, "__self__", target)  # the module of a method
        if isinstance(target, nn.Module) and any(map(is_guarded, target.parameters())):
            raise ShardingError(TRACING_REFUSED)
        return create(*args, **kwargs)

    return run
