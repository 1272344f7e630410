"""Handle SIGTERM and the signals of SLURM at the end of a batch, at the same batch on all ranks.

Lightning saves within the signal handler and tells other ranks of a SIGTERM there: collectives that may come between
those of a training step, at another point on each rank. Here a handler only records the signal. At the end of each
batch the ranks start an all-reduce of their records (a few bytes, over a process group of its own, while training goes
on) and read its result at the end of the next batch. So all ranks act at the same batch, and none waits.

Outside SLURM there is SIGTERM alone. A rank that gets one says so to the first rank (``FailureDetector``), which tells
all ranks in the broadcast that Lightning makes before each batch (``StopBroadcast``).

Lightning registers its handlers when setup is over. Until then ``SetupSignal`` ends all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_osdp.backend.hierarchical import cached_host_group
from lightning_osdp.backend.work import is_driven_by_host
from lightning_osdp.strategy.failure_detector import FailureDetector, end_process

REQUEUE, STOP = 0, 1
"""Indices of a rank's votes."""

RAISE_WAIT_S, SETUP_GRACE_S = 1.0, 5.0
"""Seconds that a signal may wait for the main thread, which may be blocked in a collective operation; and seconds after
which a process ends in which it has not ended setup."""

SIGTERM_STATUS = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM has ended, as shells give it."""


class SetupSignal:
    """A handler that lets SIGTERM end all ranks with that cause while Lightning's handlers are not there yet.

    Args:
        detector: tells the other ranks.
        rank: this rank.
    """

    def __init__(self, detector: FailureDetector, rank: int) -> None:
        self._detector, self._text = detector, f"rank {rank} was told to stop (SIGTERM) during setup\n".encode()
        self._has_raised, self._is_removed = threading.Event(), threading.Event()
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # a handler of the user stays
            self._is_removed.set()
            return
        # Python calls handlers between two instructions of the main thread; the pipe is written to at once.
        read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._other_pipe = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._raise)
        threading.Thread(target=self._watch, args=(read_end,), daemon=True, name="osdp-setup-signal").start()
        _installed.add(self)

    def remove(self) -> None:
        """Give the signal back: setup is over, or has failed."""
        if self._is_removed.is_set():
            return
        self._is_removed.set()
        self.forget()
        os.close(self._write_end)

    def forget(self) -> None:
        """Restore what was there before in this process, which may be a fork, such as a worker of a DataLoader."""
        if signal.getsignal(signal.SIGTERM) == self._raise:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(ValueError, OSError):  # the other one may be closed by now
            signal.set_wakeup_fd(self._other_pipe)

    def _raise(self, signum: int, frame: Any) -> None:
        if not self._has_raised.is_set():
            self._has_raised.set()
            self._tell()
            raise SIGTERMException(SIGTERM_STATUS)

    def _tell(self) -> None:
        """Write to standard error without the lock of its file, which the main thread may hold."""
        if sys.__stderr__ is not None:  # else it is closed, and its number may be that of another file
            with suppress(OSError):
                os.write(2, self._text)

    def _watch(self, read_end: int) -> None:
        """End this process if the main thread does not, since it is blocked or code of the user takes no notice."""
        while received := os.read(read_end, 64):
            if signal.SIGTERM in received:
                if not self._has_raised.wait(RAISE_WAIT_S):
                    self._detector.report_failure(SIGTERMException())
                if not self._is_removed.wait(SETUP_GRACE_S):
                    self._tell()
                    end_process(SIGTERM_STATUS)
        os.close(read_end)


_installed: WeakSet[SetupSignal] = WeakSet()


def _forget_in_fork() -> None:
    for setup_signal in _installed:
        setup_signal.forget()


os.register_at_fork(after_in_child=_forget_in_fork)


def install(trainer: pl.Trainer, detector: FailureDetector | None, setup_signal: SetupSignal | None = None) -> None:
    """Take over the signals that Lightning is about to handle.

    Args:
        trainer: the Trainer, before it has registered its handlers.
        detector: tells other ranks of a SIGTERM.
        setup_signal: the handler until then.
    """
    connector = trainer._signal_connector

    def register_signal_handlers() -> None:
        if setup_signal is not None:
            setup_signal.remove()
        type(connector).register_signal_handlers(connector)

    connector.register_signal_handlers = register_signal_handlers  # type: ignore[method-assign]
    environment = trainer._accelerator_connector.cluster_environment
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        if detector is not None:
            _stop_together_on_sigterm(trainer, detector)
        return
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not any(isinstance(callback, PreemptionCallback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        trainer.callbacks.append(PreemptionCallback(environment))  # type: ignore[attr-defined]


class StopBroadcast:
    """Tells all ranks before each batch whether the first one wants them to stop.

    Where the host runs ahead of the device, to read a tensor of the device would wait for all of its work. There the
    word is sent between hosts, and read before the next batch.

    Args:
        device: where the ranks compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_deferred = not is_driven_by_host(device)
        self._group = cached_host_group(dist.group.WORLD) if self._is_deferred else dist.group.WORLD
        self._pending: tuple[Any, Tensor] | None = None

    def send(self, is_stop_requested: bool) -> bool:
        """Send this word, if it is of the first rank, and return the one to heed. Collective."""
        word = torch.tensor([int(is_stop_requested)])
        work = dist.broadcast(word, src=0, group=self._group, async_op=self._is_deferred)
        if self._is_deferred:
            last, self._pending = self._pending, (work, word)
            if last is None:
                return False
            work, word = last
            work.wait()
        return bool(word.item())


def _stop_together_on_sigterm(trainer: pl.Trainer, detector: FailureDetector) -> None:
    """Stop before the same batch on all ranks in training; elsewhere at once, whereupon the other ranks end as well."""
    connector, epoch_loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    register = connector.register_signal_handlers
    broadcasts: list[StopBroadcast] = []

    def handle(signum: int, frame: Any, others: list[Callable[[int, Any], Any]]) -> None:
        is_training = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        is_second = detector.is_stop_requested
        detector.is_stop_requested = True
        for handler in others:
            handler(signum, frame)
        if not is_training or is_second:
            raise SIGTERMException

    def register_signal_handlers() -> None:
        register()
        if threading.current_thread() is not threading.main_thread():
            return
        installed = signal.getsignal(signal.SIGTERM)
        if isinstance(installed, _HandlersCompose):
            own = (connector._sigterm_notifier_fn, connector._sigterm_handler_fn)
            others = [handler for handler in installed.signal_handlers if callable(handler) and handler not in own]
            signal.signal(signal.SIGTERM, lambda signum, frame: handle(signum, frame, others))

    def raise_if_stopping() -> None:
        if epoch_loop._should_accumulate():
            return  # a checkpoint can't hold half-accumulated gradients
        if not broadcasts:
            broadcasts.append(StopBroadcast(trainer.strategy.root_device))
        if broadcasts[0].send(detector.is_stop_requested):
            raise SIGTERMException

    connector.register_signal_handlers = register_signal_handlers  # type: ignore[method-assign]
    epoch_loop._broadcast_sigterm_tensor = raise_if_stopping  # type: ignore[method-assign]


class PreemptionCallback(pl.Callback):
    """A callback that replaces Lightning's signal handlers while they are registered (Lightning restores all of them).

    Args:
        environment: the SLURM environment, which knows the signal that asks for a checkpoint and a requeue.
    """

    def __init__(self, environment: SLURMEnvironment) -> None:
        self._signals = {environment.requeue_signal or signal.SIGUSR1: REQUEUE, signal.SIGTERM: STOP}
        self._requeue_signal = environment.requeue_signal or signal.SIGUSR1
        self._requested = [0, 0]
        self._agreed = [0, 0]
        self._pending_vote: tuple[Any, Tensor] | None = None
        self._group: Any = None

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_handlers()

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._replace_handlers()
        if self._group is None:
            self._group = dist.new_group(backend="gloo")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Act on agreed signals between optimizer steps: a checkpoint can't hold half-accumulated gradients."""
        self._collect_votes()
        votes = torch.tensor(self._requested)
        self._pending_vote = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True), votes
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        connector = trainer._signal_connector
        if self._agreed[REQUEUE]:
            self._requested[REQUEUE] = self._agreed[REQUEUE] = 0
            self._pending_vote[0].wait()  # votes for the same signal
            self._pending_vote = None
            connector._slurm_sigusr_handler_fn(self._requeue_signal, None)  # type: ignore[arg-type]
        elif self._agreed[STOP]:
            connector.received_sigterm = True  # the loop ends after this batch, on all ranks

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._collect_votes()

    def _replace_handlers(self) -> None:
        """Replace Lightning's handlers; a handler of the user stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in self._signals:
            if isinstance(signal.getsignal(signum), _HandlersCompose):
                signal.signal(signum, self._record_signal)

    def _record_signal(self, signum: int, _: Any) -> None:
        self._requested[self._signals[signal.Signals(signum)]] = 1

    def _collect_votes(self) -> None:
        if self._pending_vote is None:
            return
        work, votes = self._pending_vote
        work.wait()
        self._agreed = [max(old, new) for old, new in zip(self._agreed, votes.tolist(), strict=True)]
        self._pending_vote = None
