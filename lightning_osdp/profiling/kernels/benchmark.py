"""Times kernels one by one, with made-up arguments, as they would be found in a step: with cold caches.

Only one kernel's arguments are in memory at a time, so a model that does not fit can be measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_osdp.backend.memory import memory_in_use, peak_memory, reset_peak
from lightning_osdp.backend.timer import CORE_SHARING, elapsed_s, record_event, synchronize, typical_time_s
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.profiling.kernels.kernel import (
    Kernel,
    TensorSpec,
    argsort_by_size,
    is_foreach_or_fused,
    sample_rows,
    select_from_lists,
)
from lightning_osdp.profiling.kernels.synthetic_args import clone_with_strides, make_arguments

aten = torch.ops.aten

WARMUP_REPEATS = 2
"""Runs before the first timed one: the allocator and the libraries' plans settle."""

MIN_REPEATS, MAX_REPEATS = 3, 15
"""Timed runs of one kernel; what is typical of them counts. Where there is no time for so many, it is run twice."""

MIN_OPTIMIZER_KERNEL_S = 0.06
"""Least time for one kernel of an optimizer: they are few, come last, and count as they are, while what forward and
backward take in all is rehearsed."""

AUTOGRAD_REPEATS = 5
"""Timed runs of a backward that is run by autograd."""

COLD_BYTES = 1 << 25
"""Copies of a kernel's arguments are taken in turn until they fill this much, because a step's tensors have left the
cache by the time they are read. [32 MiB; empirical, AMD EPYC with 32 MiB of cache, GPT of 4 layers: predicted forward
and backward are 0.95 to 1.03 of the measured with it, 0.88 to 0.95 on one set of arguments]"""

COLD_STATES_BYTES = 1 << 26
"""The same for an optimizer's kernels: a step has gone through all of the model when it comes to a parameter again.
[64 MiB; empirical, same processor, ViT of 14 M parameters: AdamW takes 0.6 of its time in training with half of it]"""

UNLIMITED_BYTES = 1 << 60
"""Of memory, where nobody has said how much is free."""

MAX_COPIES = 16
"""Most copies of one kernel's arguments."""

MIN_WORKSPACE_BYTES = 1 << 20
"""Less is not looked for: the process's own counters move by as much."""

OPAQUE_ARGUMENTS = frozenset({"workspace", "reserve", "reservespace"})
"""Names in aten's schemas of buffers that a library's forward leaves to its backward."""

BACKWARD_RATIO = 2.0
"""Time of a backward that can't be run at all against its forward: two matrix products for each one there."""

MAX_LIST_BYTES = 1 << 28
"""Lists of tensors that a kernel works on together are cut to about as much."""

COPY_BYTES = 1 << 26
"""Size of the copy that gives the memory bandwidth: beyond any cache. [64 MiB]"""

OVERHEAD_OPS = 200
"""Length of the chain of tiny ops that gives autograd's own time per node."""

UNRUNNABLE_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
"""What kernels raise that don't take made-up arguments."""

Progress = Callable[[int, int], None]
"""Called with (kernels done, kernels in all)."""


@dataclass(frozen=True)
class AutogradOverhead:
    """Seconds that autograd takes for each node of the graph, on top of the kernels."""

    forward_s: float
    backward_s: float


class Clock:
    """Times calls, waiting for the device where it works behind the host's back.

    Args:
        device: to time on.
        available_bytes: of memory that is free: copies of a kernel's arguments may take half of it.
    """

    def __init__(self, device: torch.device, available_bytes: int = UNLIMITED_BYTES) -> None:
        self.device = device
        self.available_bytes = available_bytes

    def time_s(self, call: Callable[[], object]) -> float:
        """Of one call."""
        synchronize(self.device)
        start = record_event(self.device)
        call()  # what it returns is freed at once: a step frees, sooner or later, all that it allocates
        return elapsed_s(start, record_event(self.device))

    def measure_time_and_workspace(self, call: Callable[[], object]) -> tuple[float, int]:
        """Seconds of one call, and the bytes that it takes at most beside its result; 0 if that is next to nothing."""
        results: list[object] = []
        reset_peak(self.device)
        before = memory_in_use(self.device)
        seconds = self.time_s(lambda: results.append(call()))
        made = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in tensors_of(results)}
        scratch = peak_memory(self.device) - before - sum(made.values())
        return seconds, scratch if scratch >= MIN_WORKSPACE_BYTES else 0


def tensors_of(value: object) -> list[Tensor]:
    """All tensors in a result that may hold any."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def run_all(kernels: Iterable[Kernel], device: torch.device) -> None:
    """Runs each different kernel, as far as it can be run by itself or after its forward."""
    unique = {kernel.key: kernel for kernel in kernels}.values()
    for kernel in unique:
        if _has_opaque_state(kernel):
            forward = _find_forward(kernel, unique)
            if forward is not None:
                _time_via_autograd(forward, kernel, Clock(device))
            continue
        with suppress(*UNRUNNABLE_ERRORS):
            args, kwargs = make_arguments(_sample(kernel), device)
            kernel.func(*args, **kwargs)


@dataclass(frozen=True)
class KernelTimes:
    """What was found out of kernels, by their keys: seconds of one call, and scratch bytes."""

    seconds: dict[object, float] = field(default_factory=dict)
    workspace_bytes: dict[object, int] = field(default_factory=dict)


def time_within_budget(
    kernels: Sequence[Kernel], clock: Clock, progress: Progress | None, budget_s: float, times: KernelTimes
) -> list[Kernel]:
    """Adds to ``times`` what different ``kernels`` take, in their order and in about ``budget_s``; gives those that
    can't be run alone."""
    refused: list[Kernel] = []
    deadline = time.perf_counter() + budget_s
    for done, kernel in enumerate(kernels):
        share = max(0.0, deadline - time.perf_counter()) / (len(kernels) - done)
        if kernel.phase == "optimizer":
            share = max(share, MIN_OPTIMIZER_KERNEL_S)
        try:
            if _has_opaque_state(kernel):
                refused.append(kernel)
            else:
                times.seconds[kernel.key] = _time(kernel, clock, share, times.workspace_bytes)
        except UNRUNNABLE_ERRORS:
            refused.append(kernel)
        if progress is not None:
            progress(done + 1, len(kernels))
    return refused


def order_for_timing(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The same on all ranks. Cheap ones first: what they leave of their share is for the large ones. An optimizer's at
    the end, by all ranks at about the same time: they take as long as the memory does, which ranks of one machine
    share."""
    return sorted(kernels, key=lambda each: (each.phase == "optimizer", each.num_bytes, each.name))


def time_all(
    kernels: Iterable[Kernel], clock: Clock, progress: Progress | None, budget_s: float, times: KernelTimes
) -> None:
    """Adds to ``times`` what those of ``kernels`` take that are not in it yet."""
    unique = {kernel.key: kernel for kernel in kernels}
    left = order_for_timing(kernel for key, kernel in unique.items() if key not in times.seconds)
    refused = time_within_budget(left, clock, progress, budget_s, times)
    times.seconds.update(_estimate_unrunnable(refused, unique.values(), times.seconds, clock, times.workspace_bytes))


def _estimate_unrunnable(
    unrunnable: Sequence[Kernel],
    kernels: Collection[Kernel],
    seconds: Mapping[object, float],
    clock: Clock,
    workspace_bytes: dict[object, int] | None,
) -> dict[object, float]:
    """Seconds of those that can't be run by themselves: after their forwards, which were timed, or by their bytes."""
    found: dict[object, float] = {}
    unknown = []
    for kernel in unrunnable:
        forward = _find_forward(kernel, kernels)
        if forward is not None and forward.key in seconds:
            found[kernel.key] = (
                _time_via_autograd(forward, kernel, clock, workspace_bytes) or BACKWARD_RATIO * seconds[forward.key]
            )
        else:
            unknown.append(kernel)
    if unknown:
        _warn_of_estimates(unknown, len(kernels))
        bandwidth = _copy_bytes_per_s(clock)
        found.update({kernel.key: kernel.num_bytes / bandwidth for kernel in unknown})
    return found


def _warn_of_estimates(kernels: list[Kernel], total: int) -> None:
    names = sorted({str(kernel.func) for kernel in kernels})
    warnings.warn(
        f"{len(kernels)} of {total} kernels can't be timed by themselves and are estimated from their bytes: "
        f"{', '.join(names[:5])}",
        OSDPWarning,
        stacklevel=5,
    )


def _has_opaque_state(kernel: Kernel) -> bool:
    """Whether it reads a buffer that only its forward can write (of cuDNN, oneDNN): made-up bytes would crash it."""
    return any(
        argument.name.lower() in OPAQUE_ARGUMENTS and isinstance(spec, TensorSpec)
        for argument, spec in zip(kernel.func._schema.arguments, kernel.args, strict=False)
    )


def _find_forward(kernel: Kernel, kernels: Iterable[Kernel]) -> Kernel | None:
    """The kernel that ``kernel`` is the backward of: named alike, on the same input."""
    name = kernel.func.overloadpacket.__name__
    forward = name.removesuffix("_backward")
    if forward == name or not kernel.args:
        return None
    alike = (k for k in kernels if k.func.overloadpacket.__name__ == forward and k.args[:1] == kernel.args[:1])
    return next(alike, None)


def _time(kernel: Kernel, clock: Clock, budget_s: float, workspace_bytes: dict[object, int] | None = None) -> float:
    """Typical seconds of one call, in about ``budget_s`` in all, on arguments that are not in the cache."""
    sample = _sample(kernel, clock.available_bytes)
    if sample is not kernel:
        return _time(sample, clock, budget_s) * kernel.num_bytes / sample.num_bytes
    start = time.perf_counter()
    args, kwargs = make_arguments(kernel, clock.device)
    func = kernel.func
    first = clock.time_s(lambda: func(*args, **kwargs))
    if workspace_bytes is not None and kernel.num_bytes >= MIN_WORKSPACE_BYTES:
        second, workspace_bytes[kernel.key] = clock.measure_time_and_workspace(lambda: func(*args, **kwargs))
    else:
        second = clock.time_s(lambda: func(*args, **kwargs))
    if time.perf_counter() - start + (WARMUP_REPEATS + MIN_REPEATS) * second > budget_s:
        return second if CORE_SHARING.is_shared else min(first, second)
    cold_bytes = max(COLD_STATES_BYTES if kernel.phase == "optimizer" else COLD_BYTES, 2 * _cache_bytes(clock.device))
    fitting = clock.available_bytes // 2 // max(1, _storage_bytes((args, kwargs)))
    copies = min(MAX_COPIES, math.ceil(cold_bytes / max(1, kernel.num_bytes)), max(1, fitting))
    sets = [(args, kwargs), *(tree_map_only(Tensor, clone_with_strides, (args, kwargs)) for _ in range(copies - 1))]
    rotation = itertools.cycle(sets)

    def call() -> float:
        positional, named = next(rotation)
        return clock.time_s(lambda: func(*positional, **named))

    for _ in range(WARMUP_REPEATS):
        call()
    left = budget_s - (time.perf_counter() - start)
    repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(left / max(second, 1e-6))))
    return typical_time_s([call() for _ in range(repeats)])


def _cache_bytes(device: torch.device) -> int:
    """Of a CUDA device's cache; 0 for a CPU, whose are as ``COLD_BYTES`` has them."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _storage_bytes(arguments: object) -> int:
    """Of all storages: those of strided tensors are larger than what a kernel reads of them."""
    return sum(one.untyped_storage().nbytes() for one in tensors_of(arguments))


def _sample(kernel: Kernel, available_bytes: int = UNLIMITED_BYTES) -> Kernel:
    """A kernel on long lists of tensors (all parameters, in an optimizer's foreach or fused form) on some of them:
    there may be no room for the model once more. Those are of all sizes, and the most that take no more than there is
    room for, or, where each alone takes more, some rows of the least. [measured, H100, GPT-2 of 354 M parameters: every
    22nd as they come may be biases alone, by which a step takes 170 ms, and no more than 10 in training]"""
    most = max(1, min(MAX_LIST_BYTES, available_bytes // 2))
    every = math.ceil(kernel.num_bytes / most)
    if every <= 1 or not is_foreach_or_fused(kernel.func):
        return kernel
    order = argsort_by_size(kernel.args)
    ways = (order[start::every] for start in range(min(every, len(order))))
    samples = [replace(kernel, args=select_from_lists(kernel.args, way)) for way in ways]
    fitting = [sample for sample in samples if sample.num_bytes <= most]
    if not fitting:
        least = min(samples, key=lambda sample: sample.num_bytes)
        share = math.ceil(least.num_bytes / most)
        return replace(least, args=tuple(sample_rows(each, share) for each in least.args))
    return max(fitting, key=lambda sample: sample.num_bytes)


def _time_via_autograd(
    forward: Kernel, backward: Kernel, clock: Clock, workspace_bytes: dict[object, int] | None = None
) -> float | None:
    """Seconds of a backward that only its forward can prepare, by autograd; None where that does not work."""
    try:
        with torch.enable_grad():
            args, kwargs = make_arguments(forward, clock.device)
            inputs = [leaf.requires_grad_() for leaf in tensors_of((args, kwargs)) if leaf.is_floating_point()]
            first = next(made for made in tensors_of(forward.func(*args, **kwargs)) if made.requires_grad)
            gradient = torch.ones_like(first)

        def call() -> object:
            return torch.autograd.grad(first, inputs, gradient, retain_graph=True, allow_unused=True)

        call()
        if workspace_bytes is not None:
            _, workspace_bytes[backward.key] = clock.measure_time_and_workspace(call)
        return typical_time_s([clock.time_s(call) for _ in range(AUTOGRAD_REPEATS)])
    except (RuntimeError, StopIteration):
        return None


def _copy_bytes_per_s(clock: Clock) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(clock.time_s(lambda: target.copy_(source)) for _ in range(5))


def measure_autograd_overhead(clock: Clock) -> AutogradOverhead:
    """Autograd's own time per node, from a chain of products of two tiny tensors against the same products alone."""
    one = torch.ones(1, device=clock.device)
    leaf = torch.ones(1, device=clock.device, requires_grad=True)

    def chain(value: Tensor) -> Tensor:
        for _ in range(OVERHEAD_OPS):
            value = aten.neg.default(value)
        return value

    forwards, backwards, alone = [], [], []
    for _ in range(WARMUP_REPEATS + MAX_REPEATS):
        alone.append(clock.time_s(lambda: chain(one)))
        ends: list[Tensor] = []
        forwards.append(clock.time_s(lambda: ends.append(chain(leaf))))  # noqa: B023
        backwards.append(clock.time_s(lambda: torch.autograd.grad(ends[0], leaf)))  # noqa: B023
    plain = statistics.median(alone)
    return AutogradOverhead(
        forward_s=max(0.0, statistics.median(forwards) - plain) / OVERHEAD_OPS,
        backward_s=max(0.0, statistics.median(backwards) - plain) / OVERHEAD_OPS,
    )
