"""Start one process for each device and connect them: the part that any strategy of several ranks has."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_osdp.backend import allocator
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.strategy.checkpointing import CheckpointingStrategy
from lightning_osdp.strategy.launcher import Launcher
from lightning_osdp.strategy.preemption import SetupSignal


class ProcessGroupStrategy(CheckpointingStrategy):
    """A strategy with one process for each device, connected by a process group.

    Args:
        timeout: the timeout of the process group.
        process_group_backend: the backend; None: NCCL on CUDA, gloo on the CPU.
        **parts: arguments that the Trainer sets.
    """

    num_nodes = 1
    """Number of machines, set by the Trainer."""
    _setup_signal: SetupSignal | None = None

    def __init__(self, timeout: timedelta, process_group_backend: str | None, **parts: Any) -> None:
        super().__init__(**parts)
        self._timeout = timeout
        self._process_group_backend = process_group_backend

    @property
    def is_distributed(self) -> bool:
        """Always True: Lightning gives each rank its part of the data."""
        return True

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def resume_checkpoint_path(self, trainer: pl.Trainer) -> tuple[str | None, bool | None]:
        """Return the checkpoint that ``fit`` will resume from, or None, before it is loaded; and ``weights_only``."""
        assert isinstance(self._launcher, Launcher)
        return self._launcher.resume_checkpoint_path(trainer), self._launcher.weights_only

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment which rank this is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        """Configure the allocator and join the process group, before any hook of the user."""
        if sys.platform == "win32":
            raise ConfigurationError(
                'strategy="osdp" trains on Linux and macOS. On Windows, train in WSL2; '
                "lightning_osdp.plan(hardware=...), osdp explain, diff and simulate work here, too"
            )
        super().setup_environment()
        allocator.configure(self.root_device)
        reset_seed()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device_id = self.root_device if self.root_device.type != "cpu" else None
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device_id)
        self._start_failure_detector(self._timeout)
        if self._failure_detector is not None and self.world_size > 1:
            self._setup_signal = SetupSignal(self._failure_detector, self.global_rank)

    @override
    def barrier(self, name: str | None = None) -> None:
        if name == "_CheckpointConnector.resume_end":  # the Trainer needs the checkpoint no longer
            self._checkpoint_format.close()
        if not _distributed_is_initialized():
            return
        self._before_collective("a barrier")
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not _distributed_is_initialized():
            return obj
        self._before_collective("a broadcast of the Trainer")
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if group in (None, dist.group.WORLD):
            self._before_collective("a reduction of the Trainer or of log(sync_dist=True)")
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def teardown(self) -> None:
        """End the run, and move the module to the CPU unless it stays sharded: units expect their device."""
        if self._setup_signal is not None:
            self._setup_signal.remove()
        self._stop_failure_detector()
        if self._engine is None or self._engine.is_restored:
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
