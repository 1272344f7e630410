"""Keep any rank from waiting for one that is gone: the strategy's part of failure detection."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from typing_extensions import override

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.engine.base import Engine
from lightning_osdp.errors import InfeasibleError, OSDPError
from lightning_osdp.strategy.failure_detector import FailureDetector, SynchronizedDataLoader, assert_equal_on_ranks


class FailureAwareStrategy(ParallelStrategy):
    """A parallel strategy that tells the other ranks why this one fails, and finds uneven data."""

    _engine: Engine | None
    _failure_detector: FailureDetector | None = None
    _num_dataloaders = 0

    def _start_failure_detector(self, timeout: timedelta) -> None:
        """Start heartbeats; every rank calls this once the process group exists."""
        self._stop_failure_detector()
        self._num_dataloaders = 0
        if is_emulated(dist.group.WORLD):
            return
        self._failure_detector = FailureDetector(self.global_rank, self.world_size, timeout, self._is_interrupted)

    def _is_interrupted(self) -> bool:
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED

    def _stop_failure_detector(self) -> None:
        if self._failure_detector is not None:
            self._failure_detector.stop()

    def note_failure(self, exception: BaseException) -> None:
        """Remember what ended the run, before callbacks hear of it."""
        if self._failure_detector is not None:
            self._failure_detector.note_failure(exception)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Publish the cause for the other ranks, or put theirs into the message."""
        if isinstance(exception, InfeasibleError):  # where it was raised tells nothing, and all ranks raise it
            sys.excepthook = partial(_print_infeasible, self.global_rank, sys.excepthook)
        if self._failure_detector is not None:
            self._failure_detector.report_failure(exception)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Wrap data of unknown length, so that it ends at the same batch on all ranks."""
        self._num_dataloaders += 1
        if self._failure_detector is None or self.world_size == 1 or sized_len(dataloader) is not None:
            return dataloader
        return SynchronizedDataLoader(dataloader, self._failure_detector, f"dataloader {self._num_dataloaders}")

    @override
    def on_train_start(self) -> None:
        self._check_num_batches("num_training_batches", "training")

    @override
    def on_validation_start(self) -> None:
        sanity = self.lightning_module is not None and self.lightning_module.trainer.sanity_checking
        self._on_evaluation_start("num_sanity_val_batches" if sanity else "num_val_batches", "validation")

    @override
    def on_test_start(self) -> None:
        self._on_evaluation_start("num_test_batches", "test")

    @override
    def on_predict_start(self) -> None:
        self._on_evaluation_start("num_predict_batches", "prediction")

    def _on_evaluation_start(self, attribute: str, kind: str) -> None:
        """Prepare for validation, test or prediction; ``attribute`` of the Trainer holds its number of batches."""
        self._check_num_batches(attribute, kind)

    def _check_num_batches(self, attribute: str, kind: str) -> None:
        assert self.lightning_module is not None
        count: Any = getattr(self.lightning_module.trainer, attribute)
        self._before_collective(f"the start of {kind}")
        assert_equal_on_ranks(dist.group.WORLD, f"the number of {kind} batches", count)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._engine is not None
        with self._refuse_stop_iteration("training_step"):
            result = super().training_step(*args, **kwargs)
        self._engine.after_training_step()
        return result

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._refuse_stop_iteration("optimizer_step"):
            return super().optimizer_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("validation", "validation_step"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("test", "test_step"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_step("prediction", "predict_step"):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluation_step(self, name: str, hook: str) -> Iterator[None]:
        own = nullcontext() if self._engine is None else self._engine.evaluation_step(name)
        with self._refuse_stop_iteration(hook), own:
            yield

    @contextmanager
    def _refuse_stop_iteration(self, hook: str) -> Iterator[None]:
        """Refuse what the Trainer would take for the end of the data, on one rank alone and without a word."""
        try:
            yield
        except StopIteration as error:
            step = getattr(self.lightning_module, hook)
            if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):  # it asks for the batches itself
                raise
            raise OSDPError(
                f"{hook} raised StopIteration, which the Trainer would take for the end of the data: "
                "give next() a default value, or catch it"
            ) from error

    def _before_collective(self, operation: str) -> None:
        """Wait for ranks that run more of the module before they come to a collective of Lightning's."""
        if self._engine is not None:
            self._engine.before_collective(operation)


def _print_infeasible(rank: int, otherwise: Callable[..., Any], kind: type, error: Any, traceback: Any) -> None:
    """Print that nothing fits in one line, on the first rank alone."""
    if not issubclass(kind, InfeasibleError):
        otherwise(kind, error, traceback)
    elif rank == 0:
        print(f"{kind.__module__}.{kind.__name__}: {error}", file=sys.stderr)
