"""Guard the sharded parameters of a module, and open the guards where torch itself is to see the local shards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.backend.fused_adam import OWN_HOOK, EnableFusedHook
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.autograd_state import is_in_backward
from lightning_osdp.state.guarded_parameter import ShardGuard, guard_of, is_guarded
from lightning_osdp.state.guarded_states import GuardedStates, guard_states, release_states, show_plain_dicts
from lightning_osdp.state.state_dict import gather_guarded_entries
from lightning_osdp.state.undispatched_functions import ask_guarded_classes

REDUCTIONS = ["sum", "mean", "amax", "amin", "max", "min", "_foreach_max", "std", "var", "var_mean"]
NORMS = ["norm", "linalg_vector_norm", "linalg_matrix_norm", "_foreach_norm"]
PRODUCTS_AND_FACTORS = ["dot", "mm", "addmm", "bmm", "baddbmm", "linalg_qr", "_linalg_svd", "_linalg_eigh"]
ELEMENT_MIXING_OPS = frozenset([*REDUCTIONS, *NORMS, *PRODUCTS_AND_FACTORS, "cumsum", "sort", "topk"])
"""Aten ops that mix the elements of a tensor. An optimizer that runs one (Adafactor's row means, LAMB's norms, Muon's
products) gives other results on a part of a parameter than on the whole."""

PER_PARAMETER_OPTIMIZERS = frozenset([Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD])
"""Optimizers whose step of one parameter neither reads nor changes anything of another."""

WATCHED_STEPS, WATCHED_EVERY = 100, 97
"""First steps in which ops of a user's own optimizer are watched, and which of the later ones are: each op takes 5 us
longer [M-engine-32]."""


class RefuseMixing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses ops that mix elements, in the step of an optimizer of sharded parameters that ran none when traced."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._optimizer = optimizer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        mixes = name in ELEMENT_MIXING_OPS and any(isinstance(t, Tensor) and t.numel() > 1 for t in tree_leaves(args))
        if mixes and self._is_stepping():
            raise ShardingError(
                f"{type(self._optimizer).__name__}.step() mixes elements of sharded weights or of their gradients "
                f"({name}), which it did not when the plan was made: let it do so from its first step on, or keep "
                "weights replicated by OSDPCallback(modes='dp')"
            )
        return func(*args, **(kwargs or {}))

    def _is_stepping(self) -> bool:
        """Return whether the step is still going on: after one that has failed, this mode stays on until the next."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_locals.get("self") is not self._optimizer:
            frame = frame.f_back  # type: ignore[assignment]
        return frame is not None


_opened_by: dict[int, tuple[Optimizer, list[ShardGuard], RefuseMixing | None]] = {}
"""The guards that an optimizer's step has opened, by the optimizer's id, and what watches an unknown optimizer."""


class OptimizerGuard:
    """Guards the states of an optimizer that the plan was made with, whatever they are replaced by, until removed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        for guard in _closed_guards(optimizer):
            guard.context.optimizer_classes.add(type(optimizer))
        guard_states(optimizer)
        self._hooks = [
            optimizer.register_load_state_dict_post_hook(guard_states),
            optimizer.register_state_dict_post_hook(show_plain_dicts),
        ]

    def remove(self) -> None:
        """Leave the optimizer with this rank's parts."""
        for hook in self._hooks:
            hook.remove()
        optimizer = self._optimizer()
        if optimizer is not None:
            release_states(optimizer)


def _guards_of(optimizer: Optimizer) -> list[ShardGuard]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return [guard for p in parameters if (guard := guard_of(p)) is not None]


def _closed_guards(optimizer: Optimizer) -> list[ShardGuard]:
    return [guard for guard in _guards_of(optimizer) if is_guarded(guard.parameter)]


def install_guards(module: nn.Module, guards: Iterable[ShardGuard]) -> list[Any]:
    """Have state dicts of the modules that hold guarded parameters show full tensors; return the hooks' handles.

    Optimizers and collectives are prepared too, once for the process.
    """
    parameters = {guard.parameter for guard in guards}
    _prepare_process()
    return [
        inner.register_state_dict_post_hook(gather_guarded_entries)  # type: ignore[no-untyped-call]
        for inner in module.modules()
        if inner is module or not parameters.isdisjoint(inner._parameters.values())
    ]


def close_opened_guards() -> None:
    """Close what a step that failed has left open."""
    for optimizer in list(_opened_by):
        _close(optimizer)


def _close(optimizer_id: int) -> None:
    optimizer, guards, watch = _opened_by.pop(optimizer_id, (None, [], None))
    if watch is not None:
        watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    for guard in guards:
        guard.close()
        guard.context.num_updates[False] += 1
    if optimizer is not None:
        optimizer.state.is_open = False  # type: ignore[attr-defined]


def _open_for_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the guards of an optimizer's parameters before its step, and around each of its closures close them.

    An optimizer of another class than those of the plan may mix the elements of a tensor: it gets full tensors.
    """
    closed = _closed_guards(optimizer)
    _refuse_within_backward(optimizer)
    guards = [guard for guard in closed if type(optimizer) in guard.context.optimizer_classes]
    if not guards:
        _complete_gradients(closed)
        return None
    guard_states(optimizer)
    states = optimizer.state
    assert isinstance(states, GuardedStates)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)

    def open_guards() -> None:
        _complete_gradients(guards)
        for guard in guards:
            guard.add_outside_gradient()
            guard.open()
        states.is_open = True
        if id(optimizer) not in _opened_by:  # else by the closure of the step that calls this one of its parent
            states.num_steps += 1
            watch = RefuseMixing(optimizer) if _is_watched(optimizer, states.num_steps) else None
            _opened_by[id(optimizer)] = optimizer, guards, watch
            if watch is not None:
                watch.__enter__()  # type: ignore[no-untyped-call]

    def run_closure() -> Any:
        _close(id(optimizer))
        assert closure is not None
        result = closure()
        open_guards()
        return result

    if closure is None:
        open_guards()
        return None
    return args[:1], {**kwargs, "closure": run_closure}


def _is_watched(optimizer: Optimizer, step: int) -> bool:
    is_due = step <= WATCHED_STEPS or step % WATCHED_EVERY == 0
    return is_due and type(optimizer) not in PER_PARAMETER_OPTIMIZERS


def _refuse_within_backward(optimizer: Optimizer) -> None:
    """Refuse the step of a hook of the user's in a backward pass, where weights are gathered and gradients local."""
    if not is_in_backward():
        return
    if guards := _guards_of(optimizer):
        raise guards[0].refusal(
            f"{type(optimizer).__name__}.step() runs within a backward pass, where its gradient is that of one rank "
            "(OSDPStrategy(update_in_backward=True) updates it there with the average)"
        )


def _order_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have guards opened after the user's hooks of an optimizer's step, and closed before them: they see full tensors.

    Where the step of a subclass calls that of its parent, which has hooks again, the guards are closed for those, too.
    """
    _close(id(optimizer))
    if not _guards_of(optimizer):
        return
    before: Any = optimizer._optimizer_step_pre_hooks
    after: Any = optimizer._optimizer_step_post_hooks
    before[OWN_HOOK], after[OWN_HOOK] = _open_for_step, _close_after_step
    for key in [OWN_HOOK, *(key for key, hook in before.items() if isinstance(hook, EnableFusedHook))]:
        before.move_to_end(key)
    after.move_to_end(OWN_HOOK, last=False)


def _remove_hooks(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    optimizer._optimizer_step_pre_hooks.pop(OWN_HOOK, None)
    optimizer._optimizer_step_post_hooks.pop(OWN_HOOK, None)


def _complete_gradients(guards: Iterable[ShardGuard]) -> None:
    for context in {guard.context: None for guard in guards}:
        context.before_update()


def _close_after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _close(id(optimizer))


_is_prepared = False


def _prepare_process() -> None:
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        register_optimizer_step_pre_hook(_order_hooks)
        register_optimizer_step_post_hook(_remove_hooks)
        ask_guarded_classes()


def mark_generation(module: nn.Module, is_sharded: bool) -> None:
    """Have ``generate`` of transformers go on until all ranks have finished, as it does for FSDP, or end that."""
    for inner in module.modules():
        vars(inner).pop("_is_fsdp_managed_module", None)
        if hasattr(type(inner), "generate") and is_sharded:
            vars(inner)["_is_fsdp_managed_module"] = True
