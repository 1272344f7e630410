"""Reads what the module's own optimizers hold and need, by stepping fake copies of them."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.utils._pytree import tree_leaves

from lightning_osdp.backend.fused_adam import can_fuse
from lightning_osdp.engine.guards import ELEMENT_MIXING_OPS, PER_PARAMETER_OPTIMIZERS
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.model import UNATTRIBUTED, OptimizerStep
from lightning_osdp.profiling.kernels.kernel import Kernel, Spec, list_length, select_from_lists, spec_of
from lightning_osdp.profiling.tracing.recorder import Op, Recorder, Recording
from lightning_osdp.profiling.tracing.stand_ins import FakeCopyMode

aten = torch.ops.aten

ASSUMED_STEP_COUNT = 5
"""Value of a state that the host reads (a step count): any small number, so that the usual branch runs."""

NEGLIGIBLE_TEMPORARIES = 0.01
"""Bytes of temporaries per byte of parameter up to which parameters may be updated one by one."""

SAMPLES_PER_KIND = 2
"""Parameters of each kind that are stepped. It takes two: what is left over from one may still be there at the next."""


@dataclass(frozen=True)
class OptimizerTrace:
    """Memory and kernels of a module's optimizers."""

    state_bytes: tuple[int, ...]
    """State of each parameter, in the order given; 0 for those that no optimizer has."""
    step: OptimizerStep
    kernels: tuple[Kernel, ...]
    """Kernels of one step of all optimizers."""
    needs_unsharded: tuple[str, ...]
    """For each parameter the class of its optimizer, if that one needs whole tensors; else empty."""


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]
    """Recorder of an optimizer's step, in which the host reads made-up numbers from fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:  # nothing has converged, and no value is out of bounds
                return False
            return ASSUMED_STEP_COUNT if not args[0].dtype.is_floating_point else float(ASSUMED_STEP_COUNT)
        return super().__torch_dispatch__(func, types, args, kwargs)


def build_optimizers(module: LightningModule) -> tuple[list[Optimizer], list[Any]]:
    """Return optimizers and schedulers from ``configure_optimizers``, in any form that Lightning accepts.

    Raises:
        MisconfigurationException: If the form is none of those (Lightning's error).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning repeats them when it configures the optimizers for good.
        config: Any = module.configure_optimizers()
        if config is None:
            return [], []
        optimizers, schedulers, _ = _configure_optimizers(config)
    optimizers = [each.optimizer if isinstance(each, LightningOptimizer) else each for each in optimizers]
    return optimizers, [each["scheduler"] if isinstance(each, dict) else each for each in schedulers]


def fake_optimizers(
    optimizers: Sequence[Optimizer], fake_mode: FakeTensorMode, device: torch.device
) -> tuple[list[Optimizer], dict[int, Tensor]]:
    """Return copies of real ``optimizers`` over fake parameters, and those parameters by the id of the real one."""
    real = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    copies, memo = FakeCopyMode(fake_mode).copy(list(optimizers), real, device)
    return copies, {id(p): memo[id(p)] for p in real}


@dataclass(frozen=True)
class Clipping:
    """The Trainer's clipping of gradients before an optimizer's step."""

    value: float = 0.0
    """Limit of elements or of the norm; 0 for no clipping."""
    by_value: bool = False
    """Whether elements are limited rather than the norm of all gradients."""

    @classmethod
    def from_trainer(cls, trainer: Any) -> Clipping:
        """Return the clipping that ``trainer`` is set to; none without a trainer."""
        value = getattr(trainer, "gradient_clip_val", None)
        return cls(float(value or 0.0), getattr(trainer, "gradient_clip_algorithm", None) == "value")

    def apply(self, parameters: Sequence[Tensor]) -> None:
        """Clip the gradients of ``parameters``."""
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
    """Step ``optimizers``, whose states and gradients are lost, and return what that took.

    Args:
        optimizers: Optimizers of fake parameters.
        parameters: Parameters to count states for; None has none.
        fake_mode: The mode that the parameters belong to.
        clipping: Clipping of the gradients, which counts as part of the step.

    Raises:
        ConfigurationError: An optimizer takes sparse gradients.
    """
    if any(isinstance(optimizer, SparseAdam) for optimizer in optimizers):
        raise ConfigurationError(
            "SparseAdam takes sparse gradients (Embedding(sparse=True)), which are not reduced over shards: use Adam "
            "and sparse=False"
        )
    _select_implementations(optimizers)
    trainable = _trainable_parameters(optimizers)
    if not trainable:
        return OptimizerTrace((0,) * len(parameters), OptimizerStep(), (), ("",) * len(parameters))
    with fake_mode:
        stepped = _step_by_kind(optimizers, trainable) or _step_all(optimizers, trainable)
        clipped = _clip(optimizers, trainable, clipping)
    for parameter in trainable:
        parameter.grad = None
    mixing = {
        id(p): type(optimizer).__name__
        for optimizer, ops in zip(optimizers, stepped.ops_by_optimizer, strict=True)
        if _holds_copies(optimizer) or any(op.func.overloadpacket.__name__ in ELEMENT_MIXING_OPS for op in ops)
        for p in _trainable_parameters([optimizer])
    }
    peak_bytes = max(stepped.peak_bytes, _peak_bytes(clipped))
    step = _estimate_temporaries(optimizers, trainable, peak_bytes, stepped.largest_only_peak_bytes)
    calls = stepped.calls + _count_calls(clipped)
    return OptimizerTrace(
        tuple(stepped.state_bytes.get(id(p), 0) for p in parameters),
        step,
        tuple(Kernel(*call, UNATTRIBUTED, "optimizer", count) for call, count in calls.items()),
        tuple(mixing.get(id(p), "") for p in parameters),
    )


def _select_implementations(optimizers: Sequence[Optimizer]) -> None:
    """Select by name what a real step runs: fused where possible (``fused_adam``), else foreach on CUDA.

    ``torch.optim`` takes foreach on CUDA by default, but not for fake tensors.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            on_cuda = all(p.device.type == "cuda" for p in group["params"])
            if can_fuse(optimizer, group):
                group["fused"] = True
            elif on_cuda and "foreach" in group and not group["foreach"] and not group.get("fused"):
                group["foreach"] = True


def _trainable_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    parameters = {id(p): p for each in optimizers for group in each.param_groups for p in group["params"]}
    return [p for p in parameters.values() if p.requires_grad]


def _holds_copies(optimizer: Optimizer) -> bool:
    """Return whether it keeps tensors like its parameters besides its states: they would not be sharded with them."""
    parameters = {id(p): p for p in _trainable_parameters([optimizer])}
    shapes = {p.shape for p in parameters.values() if p.numel() > 1}
    others = [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state")]
    tensors = [leaf for leaf in tree_leaves(others) if isinstance(leaf, Tensor)]
    return any(tensor.shape in shapes and id(tensor) not in parameters for tensor in tensors)


def _estimate_temporaries(
    optimizers: Sequence[Optimizer], trainable: Sequence[Tensor], peak_bytes: int, largest_only_peak_bytes: int
) -> OptimizerStep:
    """Return whether temporaries grow with all parameters or only with the largest, and by how much.

    A loop over parameters holds those of one, and at most a leftover tensor of the one before. A class of the user's
    own may update parameters in any way: only known optimizers are ``OptimizerStep.per_parameter``.
    """
    largest_bytes, total_bytes = max(p.nbytes for p in trainable), sum(p.nbytes for p in trainable)
    grows = peak_bytes > largest_only_peak_bytes + 1.5 * largest_bytes
    factor = peak_bytes / (total_bytes if grows else largest_bytes)
    is_known = len(optimizers) == 1 and type(optimizers[0]) in PER_PARAMETER_OPTIMIZERS
    return OptimizerStep(
        temporary_factor=factor,
        temporaries_of="total" if grows else "largest",
        per_parameter=is_known and factor < NEGLIGIBLE_TEMPORARIES,
    )


# -- one step ----------------------------------------------------------------------------------------------------------

Call = tuple[Any, tuple[Spec, ...], tuple[tuple[str, Spec], ...]]
"""An aten call: function, arguments, keyword arguments."""


class _StepRecord(NamedTuple):
    """One step of all optimizers, whose states exist already."""

    state_bytes: Mapping[int, int]
    """State by the parameter's id."""
    calls: Counter[Call]
    ops_by_optimizer: Sequence[Sequence[Op]]
    """Every op that an optimizer runs, at least once."""
    peak_bytes: int
    largest_only_peak_bytes: int
    """The peak if only the largest parameter has a gradient."""


def _step_all(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> _StepRecord:
    """Step all parameters at once."""
    _step(optimizers, trainable)
    states = _state_bytes(optimizers)
    recording, ops_by_optimizer = _step(optimizers, trainable)
    largest_only, _ = _step(optimizers, [max(trainable, key=lambda p: p.nbytes)])
    calls = _count_calls(recording, per_tensor=_is_on_cpu(trainable))
    return _StepRecord(states, calls, ops_by_optimizer, _peak_bytes(recording), _peak_bytes(largest_only))


def _step_by_kind(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> _StepRecord | None:
    """Step a few parameters of each kind, and return what stepping all would take.

    The result is None where the step of several parameters is not the sum of their steps, or nothing would be saved.
    """
    kinds = _group_by_kind(optimizers, trainable)
    sample_ids = {id(p) for kind in kinds for p in kind[:SAMPLES_PER_KIND]}
    if len(sample_ids) == len(trainable):
        return None
    samples = [p for p in trainable if id(p) in sample_ids]
    _step(optimizers, samples)
    states = _state_bytes(optimizers)
    recording, ops_by_optimizer = _step(optimizers, samples)
    singles = [_step(optimizers, kind[:1])[0] for kind in kinds]
    expected = _sum_calls(singles, [len(kind[:SAMPLES_PER_KIND]) for kind in kinds])
    if _count_calls(recording, per_tensor=_is_on_cpu(trainable)) != expected:
        return None
    largest = max(range(len(kinds)), key=lambda index: kinds[index][0].nbytes)
    return _StepRecord(
        {id(p): states.get(id(kind[0]), 0) for kind in kinds for p in kind},
        _sum_calls(singles, [len(kind) for kind in kinds]),
        ops_by_optimizer,
        _peak_bytes(recording),
        _peak_bytes(singles[largest]),
    )


def _group_by_kind(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters of the same groups of the same optimizers that have the same shape and dtype."""
    groups: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(group for each in optimizers for group in each.param_groups):
        for p in group["params"]:
            groups[id(p)].append(index)
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for p in trainable:
        kinds[(*groups[id(p)], spec_of(p), p.device)].append(p)
    return list(kinds.values())


def _is_on_cpu(parameters: Iterable[Tensor]) -> bool:
    return all(p.device.type == "cpu" for p in parameters)


def _sum_calls(recordings: Sequence[Recording], factors: Sequence[int]) -> Counter[Call]:
    total: Counter[Call] = Counter()
    for recording, factor in zip(recordings, factors, strict=True):
        total.update({call: factor * count for call, count in _count_calls(recording).items()})
    return total


def _count_calls(recording: Recording, per_tensor: bool = False) -> Counter[Call]:
    """Count the calls of a step without views, which cost nothing.

    With ``per_tensor``, a call that changes several tensors in place counts once for each: a CPU takes them in turn.
    """
    calls: Counter[Call] = Counter()
    for op in recording.ops:
        if op.is_view:
            continue
        is_split = per_tensor and op.func.overloadpacket.__name__.endswith("_")
        length = list_length(op.func, op.args) if is_split else 1
        for index in range(length):
            args = op.args if length == 1 else select_from_lists(op.args, (index,))
            calls[op.func, args, op.kwargs] += 1
    return calls


def _make_recorder(optimizers: Sequence[Optimizer], updated: Sequence[Tensor]) -> StepRecorder:
    """Give gradients to the ``updated`` parameters alone, and return a recorder that knows these and all states."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    for parameter in updated:
        parameter.grad = torch.empty_like(parameter, requires_grad=False)
    gradients = [p.grad for p in updated if p.grad is not None]
    states = [t for each in optimizers for t in tree_leaves(list(each.state.values())) if isinstance(t, Tensor)]
    return StepRecorder(nn.Module(), [*updated, *gradients, *states])


def _step(optimizers: Sequence[Optimizer], updated: Sequence[Tensor]) -> tuple[Recording, list[Sequence[Op]]]:
    """Record a step in which only ``updated`` have gradients; also return the ops of each optimizer.

    All have one where an optimizer of the user's own takes that for granted.
    """
    try:
        return _record_step(optimizers, updated)
    except (AttributeError, TypeError):  # of the None in a gradient's place
        trainable = _trainable_parameters(optimizers)
        if len(updated) == len(trainable):
            raise
        return _record_step(optimizers, trainable)


def _record_step(optimizers: Sequence[Optimizer], updated: Sequence[Tensor]) -> tuple[Recording, list[Sequence[Op]]]:
    recorder = _make_recorder(optimizers, updated)
    ops = recorder.recording.ops
    ops_by_optimizer: list[Sequence[Op]] = []
    loss: Any = torch.ones(())
    with recorder:
        for optimizer in optimizers:
            start = len(ops)
            optimizer.step(lambda: loss)  # Lightning always gives a closure; here the gradients are there
            ops_by_optimizer.append(ops[start:])
    return recorder.recording, ops_by_optimizer


def _clip(optimizers: Sequence[Optimizer], trainable: Sequence[Tensor], clipping: Clipping) -> Recording:
    if not clipping.value:
        return Recording()
    recorder = _make_recorder(optimizers, trainable)
    with recorder:
        clipping.apply(trainable)
    return recorder.recording


def _state_bytes(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """Return the bytes of each parameter's state by its id; of LBFGS, when its history is full."""
    history = {
        id(p): (2 * group["history_size"] + 3) * p.nbytes
        for optimizer in optimizers
        if isinstance(optimizer, LBFGS)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    return {
        id(p): sum(leaf.nbytes for leaf in tree_leaves(dict(state or {})) if isinstance(leaf, Tensor))
        for optimizer in optimizers
        for p, state in optimizer.state.items()
    } | history


def _peak_bytes(recording: Recording) -> int:
    return max(recording.live_bytes(), default=0)
