"""Streams for FairScale's units, and when gathered memory and reduced gradients are freed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.backend.cpu.stub_streams import STUB_STREAM, patch_cuda_streams
from lightning_osdp.backend.cpu.stub_streams import ModuleProxy as ModuleProxy


class _Bound:
    """Bytes that may wait to be freed: as many as the second largest unit has, so that the largest never waits.

    Attributes:
        max_bytes: the bound.
    """

    def __init__(self) -> None:
        self._largest_bytes = self.max_bytes = 0

    def add_unit(self, num_bytes: int) -> None:
        """Note how large a unit is."""
        smaller, self._largest_bytes = sorted((self._largest_bytes, num_bytes))
        self.max_bytes = max(self.max_bytes, smaller)


class GatherMemory(_Bound):
    """Frees gathered memory in the order of streams, so that a gather overlaps compute and the host waits for nothing.

    Gathered memory belongs to the stream of gathers. What compute has used waits to be freed until more than
    ``max_bytes`` wait. Before it is freed, and so before anything can be gathered into it, that stream waits for the
    compute. So no more than ``max_bytes`` beside what is in use are in memory, however far the host is
    ahead, and a gather runs while the unit before computes.

    Args:
        stream: of gathers; None: what is used is freed at once, since the host does not run ahead (CPU).
    """

    def __init__(self, stream: Any = None) -> None:
        super().__init__()
        self._stream = stream
        self._used: dict[int, tuple[Any, torch.UntypedStorage]] = {}

    def free(self, storage: torch.UntypedStorage) -> None:
        """Free memory when the work of the current stream so far is done with it, and with what has waited longer."""
        if self._stream is None:
            storage.resize_(0)
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        self._used[storage._cdata] = event, storage
        waiting = sum(storage.nbytes() for _, storage in self._used.values())
        while waiting > self.max_bytes:
            waiting -= self._free_oldest()

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


class ReductionMemory(_Bound):
    """Keeps gradients until they are reduced, and compute from running ahead of reductions by more than a bound.

    Gradients belong to the stream of compute, which may make others in their memory once they are freed. So before
    that, compute waits for the reductions that read them, the oldest first, and only where more than ``max_bytes``
    would be on their way. The host waits for nothing.

    Args:
        stream: of reductions; None: a gradient is freed when its reduction returns (CPU).
    """

    def __init__(self, stream: Any = None) -> None:
        super().__init__()
        self._stream = stream
        self._read: deque[tuple[Any, Sequence[Tensor], int]] = deque()
        self._num_bytes = 0

    def before_reduction(self, num_bytes: int) -> None:
        """Free what is reduced, as far as the bound demands it. The current stream is that of compute.

        Args:
            num_bytes: of the gradients that are reduced next.
        """
        while self._read and self._num_bytes + num_bytes > self.max_bytes:
            self._free_oldest()

    def retain(self, tensors: Sequence[Tensor]) -> None:
        """Keep tensors until the work of the current stream so far, that of reductions, is done with them."""
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            size = sum(tensor.nbytes for tensor in tensors)
            self._read.append((event, tensors, size))
            self._num_bytes += size

    def free_all(self) -> None:
        """Free all that is reduced."""
        while self._read:
            self._free_oldest()

    def _free_oldest(self) -> None:
        event, _, size = self._read.popleft()
        self._num_bytes -= size
        torch.cuda.current_stream().wait_event(event)


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
