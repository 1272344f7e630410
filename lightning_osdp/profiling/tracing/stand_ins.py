"""Stand-ins for a traced step: copies of the module, batches of other sizes, and a trainer that changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

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
from lightning_osdp.profiling.tracing.deep_copy import deep_copy

TRAINER_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(["current_epoch", "global_step", "global_rank", "local_rank"], 0),
    **dict.fromkeys(["world_size", "accumulate_grad_batches", "max_epochs", "max_steps", "num_training_batches"], 1),
    **dict.fromkeys(["is_global_zero", "training"], True),
    **dict.fromkeys(["validating", "sanity_checking"], False),
    "datamodule": None,
}
"""Attributes of the trainer for a module that has none."""

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
        if func is Tensor.clone:  # This is how a Parameter copies itself.
            return as_fake(args[0], self._fake_mode, args[0].device)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def copy(
        self, value: Any, moved: Iterable[Tensor], device: torch.device, shared: Iterable[Any] = ()
    ) -> tuple[Any, dict[int, Any]]:
        """Return a deep copy of ``value`` with fake tensors, and all copies by the id of their originals.

        Args:
            value: The object to copy.
            moved: Tensors whose copies lie on ``device``; those of others lie where the originals do.
            device: Any device.
            shared: Objects that are not copied.
        """
        memo: dict[int, Any] = {id(tensor): as_fake(tensor, self._fake_mode, device) for tensor in moved}
        memo.update({id(each): each for each in shared})
        with self:
            copied = deep_copy(value, memo)
            _copy_attributes(value, memo)
            return copied, memo


def as_fake(tensor: Tensor, fake_mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Return a fake tensor or parameter like ``tensor`` on ``device``."""
    if tensor.layout != torch.strided or type(tensor) not in PLAIN_TENSORS:
        return fake_mode.from_tensor(tensor, static_shapes=True)
    with fake_mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def fake_copy(module: LightningModule, fake_mode: FakeTensorMode, device: torch.device) -> LightningModule:
    """Return a copy of ``module`` with fake parameters and buffers on ``device``, tied as the originals are."""
    tensors = (*module.parameters(), *module.buffers())
    copied, _ = FakeCopyMode(fake_mode).copy(module, tensors, device, shared_objects(module))
    for inner in copied.modules():
        if isinstance(inner.__dict__.get("_device"), torch.device):
            inner.__dict__["_device"] = device
    return copied  # type: ignore[no-any-return]


def lazy_clone(module: LightningModule) -> LightningModule:
    """Return a copy of ``module`` with values of its own, attached to the same trainer.

    Parameters take no memory until either side writes to them, where torch can do that (copy on write).
    """
    memo: dict[int, Any] = {id(each): each for each in shared_objects(module)}
    for parameter in module.parameters():
        values = _try_lazy_clone(parameter)
        if values is not None:
            memo[id(parameter)] = torch.nn.Parameter(values, parameter.requires_grad)
    copied: LightningModule = deep_copy(module, memo)
    _copy_attributes(module, memo)
    for inner in copied.modules():
        if isinstance(inner, LightningModule):
            inner.__dict__["_trainer"] = module._trainer
    return copied


def _copy_attributes(value: Any, memo: dict[int, Any]) -> None:
    """Give the copies of a module's tensors the attributes that users have set on those: torch copies values alone."""
    if isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            copied = memo[id(tensor)]
            own = {name: each for name, each in vars(tensor).items() if name not in vars(copied)}
            if own:
                vars(copied).update(deep_copy(own, memo))


def lazy_clone_bytes(module: LightningModule, device: torch.device) -> int:
    """Return the bytes that a ``lazy_clone`` takes on ``device`` in the end.

    These are buffers and parameters that lie elsewhere, that can't be shared, or that the backward of recurrent layers
    asks to write.
    """
    written = {p for inner in module.modules() if isinstance(inner, torch.nn.RNNBase) for p in inner.parameters()}
    own = [p for p in module.parameters() if p.device != device or p in written or _try_lazy_clone(p) is None]
    return sum(tensor.nbytes for tensor in (*own, *module.buffers()))


def _try_lazy_clone(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the same values in the same memory until either is written; None where torch can't do that."""
    if type(parameter) is not torch.nn.Parameter:
        return None
    try:
        return torch._lazy_clone(parameter.detach())
    except (AttributeError, RuntimeError):  # Memory that is not torch's own, another layout, or another torch.
        return None


def shared_objects(module: LightningModule) -> list[Any]:
    """Return what copies of the module share with it: the trainer and its data module."""
    trainer: Any = module._trainer
    return [] if trainer is None else [trainer, getattr(trainer, "datamodule", None)]


# -- batches ---------------------------------------------------------------------------------------------------------


def has_batch_dimension(batch: Any, batch_size: int) -> bool:
    """Return whether any tensor of ``batch`` has ``batch_size`` rows."""
    has_rows: list[bool] = []
    apply_to_collection(batch, Tensor, lambda tensor: has_rows.append(_has_rows(tensor, batch_size)))
    return any(has_rows)


def fake_batch(batch: Any, batch_size: int, size: int, fake_mode: FakeTensorMode) -> Any:
    """Return ``batch`` as fake tensors of ``size`` rows where it has ``batch_size``; call it outside of the mode."""

    def resize(tensor: Tensor) -> Tensor:
        if not _has_rows(tensor, batch_size):
            return fake_mode.from_tensor(tensor, static_shapes=True)
        with fake_mode:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    return apply_to_collection(batch, Tensor, resize)


def real_batch(batch: Any, batch_size: int, size: int) -> Any:
    """Return ``batch`` with ``size`` rows where it has ``batch_size``: its first rows, repeated if need be."""

    def resize(tensor: Tensor) -> Tensor:
        if not _has_rows(tensor, batch_size):
            return tensor
        return tensor[torch.arange(size, device=tensor.device) % batch_size]

    return apply_to_collection(batch, Tensor, resize)


MAX_DRAWN_BATCHES = 8
"""Batches that a step which draws them itself gets: without an end, one that runs a whole epoch would not return."""


def move_batch(module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return ``batch`` after the transfer hooks to ``device``: the data module's if it has them, else the module's."""
    trainer = module._trainer
    datamodule = trainer.datamodule if trainer is not None else None  # type: ignore[attr-defined]

    def find_hook(name: str) -> Callable[..., Any]:
        is_own = isinstance(datamodule, LightningDataModule) and is_overridden(name, datamodule)
        return getattr(datamodule if is_own else module, name)  # type: ignore[no-any-return]

    batch = find_hook("on_before_batch_transfer")(batch, 0)
    batch = find_hook("transfer_batch_to_device")(batch, device, 0)
    return find_hook("on_after_batch_transfer")(batch, 0)


def step_arguments(module: LightningModule, batch: Any) -> list[Any]:
    """Return the arguments that ``training_step`` is called with: the batch, or an iterator that it draws from."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        return [iter([(batch, index, 0) for index in range(MAX_DRAWN_BATCHES)])]
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return [batch, 0] if takes_index else [batch]


def extract_loss(output: Any) -> Tensor:
    """Return the loss in what ``training_step`` returned.

    Raises:
        TraceError: If there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise TraceError("training_step gave no loss for the traced batch")
    return loss


def _has_rows(tensor: Tensor, batch_size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == batch_size


# -- the trainer -----------------------------------------------------------------------------------------------------


class TrainerStub:
    """The trainer that a traced module sees: the real one for reading, without logging and without loaders."""

    def __init__(self, trainer: Any, optimizers: list[Any]) -> None:
        self._real = trainer
        self.optimizers = optimizers
        self.logger = DummyLogger()
        self.loggers = [self.logger]
        self.estimated_stepping_batches = ESTIMATED_STEPS
        self.save_checkpoint = self.print = lambda *_, **__: None

    @property
    def train_dataloader(self) -> Any:
        """The loader of the run, which the trainer itself has only when training begins."""
        if self._real is None:
            return None
        loader = self._real.train_dataloader
        return self._real.fit_loop._data_source.dataloader() if loader is None else loader

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_real") is not None:
            return getattr(self._real, name)
        if name in TRAINER_DEFAULTS:
            return TRAINER_DEFAULTS[name]
        raise AttributeError(f"the module reads trainer.{name}, but it has no trainer yet")


class StrategyStub:
    """The strategy that LightningOptimizer sees: a step runs the closure and updates nothing."""

    def __init__(self, module: LightningModule) -> None:
        self.lightning_module = module

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **_: Any) -> Any:
        """Run ``closure`` alone."""
        return closure()


@contextmanager
def detached_from_trainer(
    module: LightningModule, optimizers: list[Any], schedulers: list[Any]
) -> Iterator[TrainerStub]:
    """Detach ``module`` and its inner LightningModules from their trainer until the end of the block.

    Logging, printing and stepping do nothing; ``optimizers`` and ``schedulers`` (lists that may be filled later) are
    what ``self.optimizers()`` and ``self.lr_schedulers()`` return.
    """
    stub = TrainerStub(module._trainer, optimizers)
    overrides = _overrides(stub, StrategyStub(module), schedulers)
    saved = []
    for inner in module.modules():
        if isinstance(inner, LightningModule):
            hidden = {name: inner.__dict__[name] for name in overrides if name in inner.__dict__}
            saved.append((inner, hidden, inner._trainer))
            inner.__dict__.update(overrides)
            inner.__dict__["_trainer"] = stub
    try:
        yield stub
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
        own = trainer.optimizers
        if use_pl_optimizer:
            own = [LightningOptimizer._to_lightning_optimizer(each, strategy) for each in own]  # type: ignore[arg-type]
        return own[0] if len(own) == 1 else own

    def lr_schedulers() -> Any:
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        ranks = int(trainer.world_size)
        return apply_to_collection(data, Tensor, lambda t: t.expand(ranks, *t.shape)) if ranks > 1 else data

    silent = dict.fromkeys(("log", "log_dict", "print", "clip_gradients", "lr_scheduler_step"), do_nothing)
    return {**silent, "optimizers": optimizers, "lr_schedulers": lr_schedulers, "all_gather": all_gather}


@contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random states at the end of the block."""
    python, numpy_state = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
