"""What the module's own optimizers hold and need, found by stepping fake copies of them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils._pytree import tree_leaves

from lightning_osdp.backend.fused_adam import can_fuse
from lightning_osdp.planning.spec.model import UNATTRIBUTED, OptimizerStep
from lightning_osdp.profiling.kernels.kernel import Kernel, Spec, list_length, select_from_lists, spec_of
from lightning_osdp.profiling.tracing.recorder import Op, Recorder, Recording
from lightning_osdp.profiling.tracing.stand_ins import FakeCopyMode

aten = torch.ops.aten

ASSUMED_STEP_COUNT = 5
"""What a state that the host reads (a step count) is taken to hold: any small number, so that the usual branch runs."""

ELEMENT_MIXING_OPS = frozenset(
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

PER_PARAMETER_OPTIMIZERS = frozenset([Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, SGD])
"""Optimizers whose step of one parameter neither reads nor changes anything of another."""

NEGLIGIBLE_BYTES = 0.01
"""Bytes of temporaries by byte of parameter up to which there are none to speak of."""


@dataclass(frozen=True)
class OptimizerTrace:
    """What the optimizers of a module cost."""

    state_bytes: tuple[int, ...]
    """Of each parameter, in the order given; 0 for those that no optimizer has."""
    step: OptimizerStep
    kernels: tuple[Kernel, ...]
    """Of one step of all optimizers."""
    needs_unsharded: tuple[str, ...]
    """For each parameter the class of its optimizer, if that one mixes a tensor's elements; else empty."""


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Recorder of an optimizer's step: a number that the host reads from a fake tensor is made up."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return ASSUMED_STEP_COUNT if not args[0].dtype.is_floating_point else float(ASSUMED_STEP_COUNT)
        return super().__torch_dispatch__(func, types, args, kwargs)


def build_optimizers(module: LightningModule) -> tuple[list[Optimizer], list[Any]]:
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
    copies, memo = FakeCopyMode(fake_mode).copy(list(optimizers), real, device)
    return copies, {id(p): memo[id(p)] for p in real}


@dataclass(frozen=True)
class Clipping:
    """What the Trainer does to gradients before an optimizer's step."""

    value: float = 0.0
    """0: nothing."""
    by_value: bool = False
    """Element by element; else by the norm of all."""

    @classmethod
    def from_trainer(cls, trainer: Any) -> Clipping:
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
        optimizers: with parameters that are fake tensors of ``fake_mode``; their states and gradients are lost.
        parameters: those to count states for; None has none.
        fake_mode: that the parameters belong to.
        clipping: of the gradients before the step, which counts as part of it.
    """
    _select_implementations(optimizers)
    everything = _trainable_parameters(optimizers)
    if not everything:
        return OptimizerTrace((0,) * len(parameters), OptimizerStep(), (), ("",) * len(parameters))
    with fake_mode:
        stepped = _step_by_kind(optimizers, everything) or _step_all(optimizers, everything)
        clipped = _clip(optimizers, everything, clipping)
    for parameter in everything:
        parameter.grad = None
    mixing = {
        id(p): type(each).__name__
        for each, ops in zip(optimizers, stepped.ops_by_optimizer, strict=True)
        if any(op.func.overloadpacket.__name__ in ELEMENT_MIXING_OPS for op in ops)
        for p in _trainable_parameters([each])
    }
    step = _estimate_temporaries(
        max(stepped.peak_bytes, _peak_bytes(clipped)),
        stepped.largest_only_peak_bytes,
        largest_bytes=max(p.nbytes for p in everything),
        total_bytes=sum(p.nbytes for p in everything),
    )
    step = step.model_copy(update={"per_parameter": _is_per_parameter(optimizers, step)})
    kernels = _to_kernels(stepped.calls + _count_calls(clipped))
    sizes = tuple(stepped.state_bytes.get(id(p), 0) for p in parameters)
    return OptimizerTrace(sizes, step, kernels, tuple(mixing.get(id(p), "") for p in parameters))


# -- one step ----------------------------------------------------------------------------------------------------------

Call = tuple[Any, tuple[Spec, ...], tuple[tuple[str, Spec], ...]]
"""An aten call: function, arguments, keyword arguments."""

SAMPLES_PER_KIND = 2
"""Parameters that are stepped of each kind where an optimizer takes them one by one: what is left over from one may
still be there at the next."""


@dataclass(frozen=True)
class _StepRecord:
    """One step of all optimizers, whose states are there already."""

    state_bytes: Mapping[int, int]
    """By the parameter's id."""
    calls: Counter[Call]
    ops_by_optimizer: Sequence[Sequence[Op]]
    """Of each optimizer: every op that it runs occurs."""
    peak_bytes: int
    largest_only_peak_bytes: int
    """The peak where only the largest parameter has a gradient."""


def _step_all(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> _StepRecord:
    """All parameters at once."""
    _step(optimizers, trainable)
    states = _state_bytes(optimizers)
    whole, own = _step(optimizers, trainable)
    alone, _ = _step(optimizers, [max(trainable, key=lambda p: p.nbytes)])
    return _StepRecord(
        states, _count_calls(whole, per_tensor=_is_on_cpu(trainable)), own, _peak_bytes(whole), _peak_bytes(alone)
    )


def _step_by_kind(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> _StepRecord | None:
    """From a few parameters of each kind; None where what is done for several is not the sum of what is done for each,
    or where there is nothing to save."""
    kinds = _group_by_kind(optimizers, trainable)
    chosen = {id(p) for kind in kinds for p in kind[:SAMPLES_PER_KIND]}
    if len(chosen) == len(trainable):
        return None
    some = [p for p in trainable if id(p) in chosen]
    _step(optimizers, some)
    states = _state_bytes(optimizers)
    several, own = _step(optimizers, some)
    apart = [_step(optimizers, kind[:1])[0] for kind in kinds]
    if _count_calls(several, per_tensor=_is_on_cpu(trainable)) != _sum_calls(
        apart, [len(kind[:SAMPLES_PER_KIND]) for kind in kinds]
    ):
        return None
    largest = max(range(len(kinds)), key=lambda at: kinds[at][0].nbytes)
    return _StepRecord(
        {id(p): states.get(id(kind[0]), 0) for kind in kinds for p in kind},
        _sum_calls(apart, [len(kind) for kind in kinds]),
        own,
        _peak_bytes(several),
        _peak_bytes(apart[largest]),
    )


def _group_by_kind(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parameters of the same groups of the same optimizers that look alike, together."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group for each in optimizers for group in each.param_groups):
        for p in group["params"]:
            groups.setdefault(id(p), []).append(index)
    kinds: dict[Any, list[Tensor]] = {}
    for p in trainable:
        kinds.setdefault((*groups[id(p)], spec_of(p), p.device), []).append(p)
    return list(kinds.values())


def _is_on_cpu(parameters: Sequence[Tensor]) -> bool:
    return all(p.device.type == "cpu" for p in parameters)


def _sum_calls(recordings: Sequence[Recording], factors: Sequence[int]) -> Counter[Call]:
    total: Counter[Call] = Counter()
    for recording, factor in zip(recordings, factors, strict=True):
        total.update({call: factor * count for call, count in _count_calls(recording).items()})
    return total


def _count_calls(recording: Recording, per_tensor: bool = False) -> Counter[Call]:
    """Views cost nothing and are left out.

    Args:
        recording: of a step.
        per_tensor: whether a call that changes several tensors in place counts as one call for each.
    """
    found: Counter[Call] = Counter()
    for op in recording.ops:
        if not op.is_view:
            found.update(
                _split_by_tensor(op) if per_tensor and op.func.overloadpacket.__name__.endswith("_") else [_as_call(op)]
            )
    return found


def _as_call(op: Op) -> Call:
    return op.func, op.args, op.kwargs


def _split_by_tensor(op: Op) -> list[Call]:
    """A call on lists of tensors as calls on lists of one: a CPU takes them in turn anyway."""
    length = list_length(op.func, op.args)
    if length == 1:
        return [_as_call(op)]
    return [(op.func, select_from_lists(op.args, (at,)), op.kwargs) for at in range(length)]


def _to_kernels(calls: Counter[Call]) -> tuple[Kernel, ...]:
    return tuple(Kernel(*call, UNATTRIBUTED, "optimizer", count) for call, count in calls.items())


def _select_implementations(optimizers: Sequence[Optimizer]) -> None:
    """Asks by name for the form that a real step takes: fused where that may be (``fusing``), else on CUDA foreach,
    which torch.optim takes there by default, but not for fake tensors."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            on_cuda = all(p.device.type == "cuda" for p in group["params"])
            if can_fuse(optimizer, group):
                group["fused"] = True
            elif on_cuda and "foreach" in group and not group["foreach"] and not group.get("fused"):
                group["foreach"] = True


def _trainable_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    found = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    return [p for p in found.values() if p.requires_grad]


def _make_recorder(optimizers: Sequence[Optimizer], updated: Sequence[Tensor]) -> StepRecorder:
    """Of what is done when only ``local_trainable`` have gradients."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for parameter in updated:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    known = [p.grad for p in updated if p.grad is not None]
    states = [t for each in optimizers for t in tree_leaves(list(each.state.values())) if isinstance(t, Tensor)]
    return StepRecorder(nn.Module(), [*updated, *known, *states])


def _step(optimizers: Sequence[Optimizer], updated: Sequence[Tensor]) -> tuple[Recording, list[Sequence[Op]]]:
    """One step in which only ``local_trainable`` have gradients; also what of it is each optimizer's own."""
    recorder = _make_recorder(optimizers, updated)
    ops = recorder.recording.ops
    own: list[Sequence[Op]] = []
    with recorder:
        for optimizer in optimizers:
            before = len(ops)
            optimizer.step()
            own.append(ops[before:])
    return recorder.recording, own


def _clip(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor], clipping: Clipping) -> Recording:
    if not clipping.value:
        return Recording()
    recorder = _make_recorder(optimizers, trainable)
    with recorder:
        clipping.apply(trainable)
    return recorder.recording


def _state_bytes(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Of each parameter that has a state, by its id."""
    return {
        id(p): sum(leaf.nbytes for leaf in tree_leaves(dict(state or {})) if isinstance(leaf, Tensor))
        for optimizer in optimizers
        for p, state in optimizer.state.items()
    }


def _is_per_parameter(optimizers: Sequence[Optimizer], step: OptimizerStep) -> bool:
    """See ``OptimizerStep.separable``. A class of the user's own may do anything."""
    return (
        len(optimizers) == 1
        and type(optimizers[0]) in PER_PARAMETER_OPTIMIZERS
        and step.temporary_factor < NEGLIGIBLE_BYTES
    )


def _peak_bytes(recording: Recording) -> int:
    return max(recording.live_bytes(), default=0)


def _estimate_temporaries(
    all_parameters_bytes: int, largest_only_bytes: int, *, largest_bytes: int, total_bytes: int
) -> OptimizerStep:
    """Whether temporaries grow with all parameters or only with the largest.

    A loop over parameters holds those of one, and at most a leftover tensor of the one before.
    """
    if all_parameters_bytes > largest_only_bytes + 1.5 * largest_bytes:
        return OptimizerStep(temporary_factor=all_parameters_bytes / total_bytes, temporaries_of="total")
    return OptimizerStep(temporary_factor=all_parameters_bytes / largest_bytes, temporaries_of="largest")
