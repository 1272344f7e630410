"""Streams for FairScale's units, and when gathered memory is freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_osdp.backend.cpu.stub_streams import STUB_STREAM, patch_cuda_streams
from lightning_osdp.backend.cpu.stub_streams import ModuleProxy as ModuleProxy


class GatherMemory:
    """Frees gathered memory in the order of streams, so that a gather overlaps compute and the host waits for nothing.

    Gathered memory belongs to the stream of gathers. What compute has used waits to be freed until a gather starts
    while more than ``max_bytes`` wait. Before it is freed, and so before anything can be gathered into it, that stream
    waits for the compute. So no more than ``max_bytes`` beside what is in use are in memory, however far the host is
    ahead, and a gather runs while the unit before computes.

    Args:
        stream: of gathers; None: what is used is freed at once, since the host does not run ahead (CPU).

    Attributes:
        max_bytes: as large as the largest unit.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream, self.max_bytes = stream, 0
        self._used: dict[int, tuple[Any, torch.UntypedStorage]] = {}

    def before_gather(self) -> None:
        """Free what compute has used, the oldest first, until no more than ``max_bytes`` wait for that."""
        waiting = sum(storage.nbytes() for _, storage in self._used.values())
        while waiting > self.max_bytes:
            waiting -= self._free_oldest()

    def free(self, storage: torch.UntypedStorage) -> None:
        """Free memory when the work of the current stream so far is done with it."""
        if self._stream is None:
            storage.resize_(0)
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._used[storage._cdata] = event, storage

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Have gathers write to this memory when compute is done with it, if it is not freed yet."""
        event, _ = self._used.pop(storage._cdata, (None, storage))
        if event is not None:
            self._stream.wait_event(event)

    def free_all(self) -> None:
        """Free all that compute has used."""
        while self._used:
            self._free_oldest()

    def _free_oldest(self) -> int:
        event, storage = self._used.pop(next(iter(self._used)))
        num_bytes = storage.nbytes()
        self._stream.wait_event(event)
        storage.resize_(0)
        return num_bytes


def create_streams(device: torch.device, names: Sequence[str], module: Any) -> dict[str, Any]:
    """Return a stream for each name, by name.

    Args:
        device: where they run.
        names: of the streams.
        module: the Python module that uses them; on a CPU its ``torch`` is replaced by one without CUDA.
    """
    if device.type == "cuda":
        return {name: torch.cuda.Stream(device, priority=-1) for name in names}  # type: ignore[no-untyped-call]
    patch_cuda_streams(module)
    return dict.fromkeys(names, STUB_STREAM)
