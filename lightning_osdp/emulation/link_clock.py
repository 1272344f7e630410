"""Let the time of emulated collectives pass: deadlines on a CPU, kernels that spin on streams of their own on CUDA."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_cuda: Any = torch.cuda  # its stubs are incomplete

CALIBRATION_CYCLES = 200_000_000
"""Length of the spin that tells how many cycles the device makes in a second: about 0.1 s."""


class LinkClock:
    """When each link is free again. Collectives on one link come one after the other."""

    def __init__(self) -> None:
        self._free_s: dict[str, float] = {}
        self._streams: dict[str, Any] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let collectives take no time of their links within a context."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def start(
        self, copy: Callable[[], None], results: Sequence[Tensor], seconds: float, links: Sequence[str]
    ) -> dist.Work:
        """Start a collective.

        Args:
            copy: fills the results.
            results: tensors that may be used after the returned handle's ``wait``.
            seconds: how long it takes once its links are free.
            links: names of the links that it occupies.
        """
        if self._is_paused:
            seconds, links = 0.0, ()
        if results and results[0].device.type == "cuda":
            return self._start_on_stream(copy, results, seconds, links)
        now = time.perf_counter()
        end_s = max([now, *(self._free_s.get(link, 0.0) for link in links)]) + seconds
        self._free_s |= dict.fromkeys(links, end_s)
        copy()
        return _DeadlineWork(results, end_s)

    def _start_on_stream(
        self, copy: Callable[[], None], results: Sequence[Tensor], seconds: float, links: Sequence[str]
    ) -> dist.Work:
        device = results[0].device
        names = list(links) or ["none"]
        streams = [self._stream(name, device) for name in names]
        main, *others = streams
        main.wait_stream(_cuda.current_stream(device))
        for other in others:
            main.wait_stream(other)
        with _cuda.stream(main):
            copy()
            if seconds:
                _cuda._sleep(int(seconds * _cycles_per_s(device)))
            event = _cuda.Event()
            event.record(main)
        for other in others:
            other.wait_event(event)
        for tensor in results:
            tensor.record_stream(main)
        return _StreamWork(results, event, main)

    def _stream(self, link: str, device: torch.device) -> Any:
        if link not in self._streams:
            self._streams[link] = _cuda.Stream(device, priority=-1)
        return self._streams[link]


class _DeadlineWork(dist.Work):
    """A collective on CPU tensors: its data are there, but not to be used before a point in time."""

    def __init__(self, results: Sequence[Tensor], end_s: float) -> None:
        super().__init__()
        self._results, self._end_s = list(results), end_s
        self._future: Any = None

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until the collective is over."""
        left_s = self._end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return time.perf_counter() >= self._end_s

    def result(self) -> list[Tensor]:
        """Return the tensors that were filled."""
        return self._results

    def get_future(self) -> Any:
        """Return a future that has the results once the collective is over, as DDP waits for."""
        if self._future is None:
            self._future = torch.futures.Future()
            _alarm().call_at(self._end_s, lambda: self._future.set_result(self._results))
        return self._future


class _StreamWork(dist.Work):
    """A collective on CUDA tensors; ``wait`` makes the current stream wait, as NCCL's does."""

    def __init__(self, results: Sequence[Tensor], event: Any, stream: Any) -> None:
        super().__init__()
        self._results, self._event = list(results), event
        self._future: Any = torch.futures.Future(devices=[results[0].device])
        with _cuda.stream(stream):
            self._future.set_result(self._results)

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the collective."""
        _cuda.current_stream(self._results[0].device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Return whether it is over."""
        return bool(self._event.query())

    def result(self) -> list[Tensor]:
        """Return the tensors that were filled."""
        return self._results

    def get_future(self) -> Any:
        """Return a future whose results wait for the collective on the stream that uses them."""
        return self._future


class _Alarm:
    """A thread that calls functions at given points in time."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True, name="osdp-emulated-links").start()

    def call_at(self, when_s: float, call: Callable[[], None]) -> None:
        """Have ``call`` called once ``time.perf_counter()`` is ``when_s``."""
        with self._changed:
            heapq.heappush(self._calls, (when_s, next(self._numbers), call))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._calls or self._calls[0][0] > time.perf_counter():
                    self._changed.wait(self._calls[0][0] - time.perf_counter() if self._calls else None)
                _, _, call = heapq.heappop(self._calls)
            call()


@cache
def _alarm() -> _Alarm:
    return _Alarm()


@cache
def _cycles_per_s(device: torch.device) -> float:
    """Return how many cycles of ``torch.cuda._sleep`` last a second."""
    _cuda._sleep(CALIBRATION_CYCLES // 20)
    _cuda.synchronize(device)
    start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
    start.record()
    _cuda._sleep(CALIBRATION_CYCLES)
    end.record()
    _cuda.synchronize(device)
    return CALIBRATION_CYCLES / float(start.elapsed_time(end)) * 1e3
