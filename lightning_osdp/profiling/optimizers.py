"""What the module's own optimizers hold and need, found by stepping fake copies of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_osdp.planning.operators import OUTSIDE, OptimizerStep
from lightning_osdp.profiling.kernels import Kernel
from lightning_osdp.profiling.moments import kernels_of
from lightning_osdp.profiling.recorder import Op, Recorder, Recording
from lightning_osdp.profiling.standins import FakeCopy

aten = torch.ops.aten

STEPS_BEFORE = 5
"""What a state that the host reads (a step count) is taken to hold: any small number, so that the usual branch runs."""

ACROSS_ELEMENTS = frozenset(
    [
        "sum",
        "mean",
        "norm",
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "_foreach_norm",
        "dot",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "amax",
        "amin",
        "max",
        "min",
        "_foreach_max",
        "std",
        "var",
        "var_mean",
        "cumsum",
        "sort",
        "topk",
        "linalg_qr",
        "_linalg_svd",
        "_linalg_eigh",
    ]
)
"""Names of aten ops that mix the elements of a tensor. An optimizer that runs one (Adafactor's row means, LAMB's norms,
Muon's products) gives other results on a part of a parameter than on the whole."""


@dataclass(frozen=True)
class OptimizerTrace:
    """What the optimizers of a module cost."""

    state_bytes: tuple[int, ...]
    """Of each parameter, in the order given; 0 for those that no optimizer has."""
    step: OptimizerStep
    kernels: tuple[Kernel, ...]
    """Of one step of all optimizers."""
    needs_whole: tuple[str, ...]
    """For each parameter the class of its optimizer, if that one mixes a tensor's elements; else empty."""


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Recorder of an optimizer's step: a number that the host reads from a fake tensor is made up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return STEPS_BEFORE if not args[0].dtype.is_floating_point else float(STEPS_BEFORE)
        return super().__torch_dispatch__(func, types, args, kwargs)


def configured(module: LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """(optimizers, schedulers) from the module's ``configure_optimizers``, in any form that Lightning takes.

    Raises:
        MisconfigurationException: (Lightning's) the form is none of those.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning repeats them when it configures the optimizers for good
        config: Any = module.configure_optimizers()
        if config is None:
            return [], []
        optimizers, schedulers, _ = _configure_optimizers(config)
    optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in optimizers]
    plain = [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]
    return optimizers, plain


def fake_optimizers(
    optimizers: Sequence[Optimizer], fake_mode: FakeTensorMode, device: torch.device
) -> tuple[list[Optimizer], dict[int, Tensor]]:
    """Copies of real ``optimizers`` over fake parameters; also those parameters, by the id of the real one."""
    real = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    copies, memo = FakeCopy(fake_mode).copy(list(optimizers), real, device)
    return copies, {id(p): memo[id(p)] for p in real}


@dataclass(frozen=True)
class Clipping:
    """What the Trainer does to gradients before an optimizer's step."""

    value: float = 0.0
    """0: nothing."""
    by_value: bool = False
    """Element by element; else by the norm of all."""

    @classmethod
    def of(cls, trainer: Any) -> Clipping:
        """As ``trainer`` is set; none without a trainer."""
        value = getattr(trainer, "gradient_clip_val", None)
        return cls(float(value or 0.0), getattr(trainer, "gradient_clip_algorithm", None) == "value")

    def apply(self, parameters: Sequence[Tensor]) -> None:
        """Clips the gradients of ``parameters``."""
        if self.value and self.by_value:
            nn.utils.clip_grad_value_(parameters, self.value)
        elif self.value:
            nn.utils.clip_grad_norm_(parameters, self.value)


NO_CLIPPING = Clipping()


def trace_optimizers(
    optimizers: Sequence[Optimizer],
    parameters: Sequence[Tensor | None],
    fake_mode: FakeTensorMode,
    clipping: Clipping = NO_CLIPPING,
) -> OptimizerTrace:
    """Steps ``optimizers``, which hold fake parameters, and reads what that took.

    Args:
        optimizers: with parameters that are fake tensors of ``fake_mode``; their states are lost.
        parameters: those to count states for; None has none.
        fake_mode: that the parameters belong to.
        clipping: of the gradients before the step, which counts as part of it.
    """
    _prefer_foreach(optimizers)
    everything = _trainable(optimizers)
    if not everything:
        return OptimizerTrace((0,) * len(parameters), OptimizerStep(), (), ("",) * len(parameters))
    with fake_mode:
        _step(optimizers, everything)
        states = {id(p): _state_bytes(optimizer.state.get(p)) for optimizer in optimizers for p in optimizer.state}
        whole, updates = _step(optimizers, everything, clipping)
        largest = max(everything, key=lambda p: p.nbytes)
        alone, _ = _step(optimizers, [largest], clipping)
    mixing = {
        id(p): type(each).__name__
        for each, ops in zip(optimizers, updates, strict=True)
        if any(op.func.overloadpacket.__name__ in ACROSS_ELEMENTS for op in ops)
        for p in _trainable([each])
    }
    step = _temporaries(
        _peak(whole), _peak(alone), largest_bytes=largest.nbytes, total_bytes=sum(p.nbytes for p in everything)
    )
    kernels = tuple(_as_step(kernel) for kernel in kernels_of(whole, [OUTSIDE] * len(whole.ops)))
    sizes = tuple(states.get(id(p), 0) for p in parameters)
    return OptimizerTrace(sizes, step, kernels, tuple(mixing.get(id(p), "") for p in parameters))


def _as_step(kernel: Kernel) -> Kernel:
    return Kernel(kernel.func, kernel.args, kernel.kwargs, OUTSIDE, "optimizer", kernel.count, 0)


def _prefer_foreach(optimizers: Sequence[Optimizer]) -> None:
    """On CUDA torch.optim takes its foreach form by default, but not for fake tensors: asks for it by name."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            on_cuda = all(p.device.type == "cuda" for p in group["params"])
            if on_cuda and "foreach" in group and not group["foreach"] and not group.get("fused"):
                group["foreach"] = True


def _trainable(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    found = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    return [p for p in found.values() if p.requires_grad]


def _step(
    optimizers: Sequence[Optimizer], updated: Sequence[Tensor], clipping: Clipping = NO_CLIPPING
) -> tuple[Recording, list[Sequence[Op]]]:
    """One step in which only ``updated`` have gradients; also what of it is each optimizer's own."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for parameter in updated:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    known = [p.grad for p in updated if p.grad is not None]
    states = [t for each in optimizers for t in tree_leaves(list(each.state.values())) if isinstance(t, Tensor)]
    recorder = StepRecorder(nn.Module(), [*updated, *known, *states])
    ops = recorder.recording.ops
    own: list[Sequence[Op]] = []
    with recorder:
        clipping.apply(updated)
        for optimizer in optimizers:
            before = len(ops)
            optimizer.step()
            own.append(ops[before:])
    return recorder.recording, own


def _state_bytes(state: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(dict(state or {})) if isinstance(leaf, Tensor))


def _peak(recording: Recording) -> int:
    return max(recording.live_bytes(), default=0)


def _temporaries(whole: int, alone: int, *, largest_bytes: int, total_bytes: int) -> OptimizerStep:
    """Whether temporaries grow with all parameters or only with the largest.

    A loop over parameters holds those of one, and at most a leftover tensor of the one before.
    """
    if whole > alone + 1.5 * largest_bytes:
        return OptimizerStep(temporary_factor=whole / total_bytes, of="total")
    return OptimizerStep(temporary_factor=whole / largest_bytes, of="largest")
