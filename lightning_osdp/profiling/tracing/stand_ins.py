"""Stand-ins for a traced step: a fake copy of the module, batches of other sizes, and a trainer that is left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_osdp.errors import TraceError

if TYPE_CHECKING:
    from lightning_osdp.profiling.tracing.recorder import Recorder

TRAINER_DEFAULTS: dict[str, Any] = {
    "current_epoch": 0,
    "global_step": 0,
    "global_rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "is_global_zero": True,
    "training": True,
    "validating": False,
    "sanity_checking": False,
    "datamodule": None,
    "accumulate_grad_batches": 1,
    "max_epochs": 1,
    "max_steps": 1,
    "num_training_batches": 1,
}
"""What a module sees of a trainer when it has none."""

ESTIMATED_STEPS = 1000
"""``trainer.estimated_stepping_batches`` in a trace: the true number would build the data loaders, and only the
learning rate depends on it, which changes neither bytes nor time."""

PLAIN_TENSORS = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
"""Types that shape, stride and dtype describe in full."""


class FakeCopyMode(TorchFunctionMode):
    """Inside it, copies of tensors are fake: shapes, strides and dtypes without data."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), as_fake(tensor, self._fake_mode, tensor.device))
        if func is Tensor.clone:  # how a Parameter copies itself
            return as_fake(args[0], self._fake_mode, args[0].device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def copy(
        self, value: Any, moved: Iterable[Tensor], device: torch.device, shared: Iterable[Any] = ()
    ) -> tuple[Any, dict[int, Any]]:
        """A deep copy of ``value`` in which the tensors ``train_under_two_plans`` come out on ``device``, all others on their own.

        Objects in ``is_shared`` are not copied. Also gives the copies by the id of their originals.
        """
        memo: dict[int, Any] = {id(tensor): as_fake(tensor, self._fake_mode, device) for tensor in moved}
        memo.update({id(each): each for each in shared})
        with self:
            return copy.deepcopy(value, memo), memo


def as_fake(tensor: Tensor, fake_mode: FakeTensorMode, device: torch.device) -> Tensor:
    """A fake tensor or parameter like ``tensor``, on ``device``."""
    if tensor.layout != torch.strided or type(tensor) not in PLAIN_TENSORS:
        return fake_mode.from_tensor(tensor, static_shapes=True)
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(module: LightningModule, fake_mode: FakeTensorMode, device: torch.device) -> LightningModule:
    """A copy of ``module`` with fake parameters and buffers on ``device``; ties and structure are kept."""
    trainer: Any = module._trainer
    kept = [] if trainer is None else [trainer, getattr(trainer, "datamodule", None)]
    twin, _ = FakeCopyMode(fake_mode).copy(module, (*module.parameters(), *module.buffers()), device, kept)
    for inner in twin.modules():
        if isinstance(inner.__dict__.get("_device"), torch.device):
            inner.__dict__["_device"] = device
    found: LightningModule = twin
    return found


def lazy_clone(module: LightningModule) -> LightningModule:
    """A copy of ``module`` with values of its own, attached to the same trainer.

    Parameters take no memory until either side writes to them, where torch can do that (copy on write).
    """
    trainer: Any = module._trainer
    kept = [] if trainer is None else [trainer, getattr(trainer, "datamodule", None)]
    memo: dict[int, Any] = {id(each): each for each in kept}
    for parameter in module.parameters():
        values = _try_lazy_clone(parameter)
        if values is not None:
            memo[id(parameter)] = torch.nn.Parameter(values, parameter.requires_grad)
    return copy.deepcopy(module, memo)


def lazy_clone_bytes(module: LightningModule, device: torch.device) -> int:
    """What ``lazy_clone`` takes on ``device`` at last: buffers, and parameters that come from elsewhere, that can't be
    shared, or that are asked for to be written: by the backward of recurrent layers."""
    written = {p for inner in module.modules() if isinstance(inner, torch.nn.RNNBase) for p in inner.parameters()}
    own = [p for p in module.parameters() if p.device != device or p in written or _try_lazy_clone(p) is None]
    return sum(tensor.nbytes for tensor in (*own, *module.buffers()))


def _try_lazy_clone(parameter: torch.nn.Parameter) -> Tensor | None:
    """The same values in the same memory until either is written; None where torch can't do that."""
    if type(parameter) is not torch.nn.Parameter:
        return None
    try:
        return torch._lazy_clone(parameter.detach())
    except (AttributeError, RuntimeError):  # memory that is not torch's own, another layout, another torch
        return None


# -- batches ---------------------------------------------------------------------------------------------------------


def has_batch_dimension(batch: Any, batch_size: int) -> bool:
    """Whether any tensor of ``batch`` has ``batch_size`` rows."""
    found: list[bool] = []
    apply_to_collection(batch, Tensor, lambda tensor: found.append(_has_rows(tensor, batch_size)))
    return any(found)


def fake_batch(batch: Any, batch_size: int, size: int, fake_mode: FakeTensorMode) -> Any:
    """``batch`` as fake tensors of ``size`` rows where it had ``batch_size`` rows; call it outside of the mode."""

    def resize(tensor: Tensor) -> Tensor:
        if not _has_rows(tensor, batch_size):
            return fake_mode.from_tensor(tensor, static_shapes=True)
        with fake_mode:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    return apply_to_collection(batch, Tensor, resize)


def real_batch(batch: Any, batch_size: int, size: int) -> Any:
    """``batch`` with ``size`` rows where it had ``batch_size``: its first rows, repeated where there are too few."""

    def resize(tensor: Tensor) -> Tensor:
        if not _has_rows(tensor, batch_size):
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % batch_size]

    return apply_to_collection(batch, Tensor, resize)


def move_batch(module: LightningModule, batch: Any, device: torch.device) -> Any:
    """``batch`` after the hooks that bring it to ``device``: the data module's where it has them, else the module's."""
    trainer = module._trainer
    datamodule = trainer.datamodule if trainer is not None else None  # type: ignore[attr-defined]

    def find_hook(name: str) -> Callable[..., Any]:
        own = isinstance(datamodule, LightningDataModule) and is_overridden(name, datamodule)
        chosen: Callable[..., Any] = getattr(datamodule if own else module, name)
        return chosen

    batch = find_hook("on_before_batch_transfer")(batch, 0)
    batch = find_hook("transfer_batch_to_device")(batch, device, 0)
    return find_hook("on_after_batch_transfer")(batch, 0)


def step_arguments(module: LightningModule, batch: Any) -> list[Any]:
    """What ``training_step`` is called with.

    Raises:
        TraceError: it draws its batches itself.
    """
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise TraceError("training_step takes a dataloader_iter: its batches can't be resized")
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return [batch, 0] if takes_index else [batch]


def extract_loss(output: Any) -> Tensor:
    """Of what ``training_step`` gave.

    Raises:
        TraceError: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TraceError("training_step gave no loss for the traced batch")
    return loss


def _has_rows(tensor: Tensor, batch_size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == batch_size


# -- the trainer -----------------------------------------------------------------------------------------------------


class TrainerStub:
    """What a traced module sees as its trainer: the real one for reading, without logging and without loaders."""

    def __init__(self, trainer: Any, optimizers: list[Any]) -> None:
        self._real = trainer
        self.optimizers = optimizers
        self.logger = DummyLogger()
        self.loggers = [self.logger]
        self.estimated_stepping_batches = ESTIMATED_STEPS

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_real") is not None:
            return getattr(self._real, name)
        if name in TRAINER_DEFAULTS:
            return TRAINER_DEFAULTS[name]
        raise AttributeError(f"the module reads trainer.{name}, but it has no trainer yet")


class StrategyStub:
    """What LightningOptimizer takes for a strategy: a step runs the closure and updates nothing."""

    def __init__(self, module: LightningModule) -> None:
        self.lightning_module = module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **_: Any) -> Any:
        """Runs ``closure`` alone."""
        return closure()


@contextmanager
def detached_from_trainer(
    module: LightningModule, optimizers: list[Any], schedulers: list[Any]
) -> Iterator[TrainerStub]:
    """Detaches ``module`` and its inner LightningModules from their trainer until the end of the block.

    Logging, printing and stepping do nothing; ``optimizers`` and ``schedulers`` (lists that may be filled later) are
    what ``self.optimizers()`` and ``self.lr_schedulers()`` give.
    """
    view = TrainerStub(module._trainer, optimizers)
    strategy = StrategyStub(module)
    overrides = _overrides(view, strategy, schedulers)
    saved = []
    for inner in module.modules():
        if isinstance(inner, LightningModule):
            hidden = {name: inner.__dict__[name] for name in overrides if name in inner.__dict__}
            saved.append((inner, hidden, inner._trainer))
            inner.__dict__.update(overrides)
            inner.__dict__["_trainer"] = view
    try:
        yield view
    finally:
        for inner, hidden, trainer in saved:
            for name in overrides:
                inner.__dict__.pop(name, None)
            inner.__dict__.update(hidden)
            inner.__dict__["_trainer"] = trainer


def _overrides(trainer: TrainerStub, strategy: StrategyStub, schedulers: list[Any]) -> dict[str, Callable[..., Any]]:
    def do_nothing(*_: Any, **__: Any) -> None:
        return None

    def optimizers(use_pl_optimizer: bool = True) -> Any:
        every = trainer.optimizers
        if use_pl_optimizer:
            every = [LightningOptimizer._to_lightning_optimizer(each, strategy) for each in every]  # type: ignore[arg-type]
        return every[0] if len(every) == 1 else every

    def lr_schedulers() -> Any:
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        ranks = int(trainer.world_size)
        return apply_to_collection(data, Tensor, lambda t: t.expand(ranks, *t.shape)) if ranks > 1 else data

    silent = ("log", "log_dict", "print", "clip_gradients", "lr_scheduler_step")
    given: dict[str, Callable[..., Any]] = {
        "optimizers": optimizers,
        "lr_schedulers": lr_schedulers,
        "all_gather": all_gather,
    }
    return {**dict.fromkeys(silent, do_nothing), **given}


def make_manual_backward(module: LightningModule, recorder: Recorder) -> Callable[..., None]:
    """``manual_backward`` for a traced module: its own ``mark_backward``, marked as such in the recording."""

    def manual_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with recorder.mark_backward():
            module.backward(loss, *args, **kwargs)

    return manual_backward


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restores Python's, NumPy's and torch's random states at the end of the block."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
