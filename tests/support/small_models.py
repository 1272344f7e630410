"""Small models with slices and blocks, by hand: what they cost can be worked out on paper."""

from __future__ import annotations

from lightning_osdp.planning.cost.trial_correction import pass_times
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit, ComputeTimes, Link, OperatorTime, SplitTime
from lightning_osdp.planning.spec.model import (
    UNATTRIBUTED,
    LinearInBatch,
    ModelProfile,
    Moment,
    Operator,
    ParameterInfo,
    RepeatedBlock,
)

MIB = 1 << 20
RANKS = 4


def linear(name: str, mebibytes: int = 4, *, splittable: bool = True, rows: int = 4) -> Operator:
    """A matrix of ``mebibytes`` with Adam, so 4 times that in all; its input and its output take 1 MiB a sample."""
    shape = (mebibytes * MIB // 4 // rows, rows)
    weight = ParameterInfo(name=f"{name}.weight", shape=shape, optimizer_bytes=2 * mebibytes * MIB)
    if not splittable:
        return Operator(name=name, kind="Linear", parameters=(weight,), unsplittable_reason="made so")
    return Operator(
        name=name,
        kind="Linear",
        parameters=(weight,),
        split_dims=(1, 0),
        output_dims=(0,),
        input_per_sample=float(MIB),
        output_per_sample=float(MIB),
    )


def blocks_of_one(count: int, saved_mib: int, *, splittable: bool = True) -> ModelProfile:
    """``world_size`` blocks of an operator (4 MiB) and a function that saves; each takes and gives 1 MiB a sample."""
    operators = tuple(linear(f"blocks.{index}.up", splittable=splittable) for index in range(count))
    moments, before = [], []
    live = 1
    for index in range(count):
        before.append(live)
        moments.append(Moment(phase="forward", operator=index, live=mib(live + 1)))
        live += 1 + saved_mib
        moments.append(Moment(phase="forward", operator=UNATTRIBUTED, live=mib(live)))
    ends = {}
    for index in reversed(range(count)):
        ends[index] = live
        moments.append(Moment(phase="backward", operator=UNATTRIBUTED, live=mib(live + 1)))
        moments.append(Moment(phase="backward", operator=index, live=mib(live + 1)))
        live -= 1 + saved_mib
    blocks = tuple(
        RepeatedBlock(
            name=f"blocks.{index}",
            kind="Block in blocks",
            operators=(index,),
            forward=(2 * index, 2 * index + 1),
            backward=(2 * (2 * count - 1 - index), 2 * (2 * count - 1 - index) + 1),
            recompute_saves=mib(saved_mib),
            live_before_forward=mib(before[index]),
            live_before_backward=mib(ends[index]),
        )
        for index in range(count)
    )
    return ModelProfile(fingerprint="", operators=operators, moments=tuple(moments), blocks=blocks, batch_size=1)


def blocks_of_two(count: int, saved_mib: int = 2, sizes: tuple[int, int] = (4, 8)) -> ModelProfile:
    """``world_size`` blocks of two operators; each keeps ``saved_mib`` a sample beside the block's output of 1 MiB."""
    operators = tuple(
        linear(f"blocks.{index}.{name}", size, splittable=False)
        for index in range(count)
        for name, size in zip(("up", "down"), sizes, strict=True)
    )
    grows = 1 + saved_mib
    forward = [
        Moment(phase="forward", operator=index, live=mib(1 + grows * (index // 2) + (grows if index % 2 else 1)))
        for index in range(2 * count)
    ]
    backward = [
        Moment(phase="backward", operator=index, live=mib(1 + grows * (index // 2 + 1)))
        for index in reversed(range(2 * count))
    ]
    blocks = tuple(
        RepeatedBlock(
            name=f"blocks.{index}",
            kind="Block in blocks",
            operators=(2 * index, 2 * index + 1),
            forward=(2 * index, 2 * index + 1),
            backward=(4 * count - 2 * index - 2, 4 * count - 2 * index - 1),
            recompute_saves=mib(saved_mib),
            live_before_forward=mib(1 + grows * index),
            live_before_backward=mib(1 + grows * (index + 1)),
        )
        for index in range(count)
    )
    moments = (*forward, *backward)
    return ModelProfile(fingerprint="", operators=operators, moments=moments, blocks=blocks, batch_size=1)


def mib(per_sample: float) -> LinearInBatch:
    return LinearInBatch(per_sample=per_sample * MIB)


def cluster(
    all_reduce_ms: float = 1.0, gather_ms: float = 1.0, scatter_ms: float = 1.0, latency_ms: float = 0.0
) -> Cluster:
    """Collectives of a tensor of 4 MiB take so long on 4 ranks, and each so much more whatever its size."""

    def fit(milliseconds: float) -> CollectiveFit:
        return CollectiveFit(latency_s=latency_ms * 1e-3 / 3, s_per_byte=milliseconds * 1e-3 / (3 * MIB))

    link = Link(all_reduce=fit(all_reduce_ms), all_gather=fit(gather_ms), reduce_scatter=fit(scatter_ms))
    return Cluster(devices_per_node=RANKS, device="cpu", backend="gloo", link=link, reduce_scatter_copy_factor=0.0)


def compute(
    model: ModelProfile, forward_ms: float = 1.0, slices: tuple[int, ...] = (2, 4), per_slice_ms: float = 0.1
) -> ComputeTimes:
    """Forward and twice that in backward a sample, each slice a little more; half a forward outside in each block."""
    times = []
    for operator in model.operators:
        splits = tuple(
            SplitTime(dim=operator.split_dims[0], slices=k, forward=ms(k * per_slice_ms), backward=ms(k * per_slice_ms))
            for k in (slices if operator.split_dims else ())
        )
        times.append(OperatorTime(forward=ms(forward_ms), backward=ms(2 * forward_ms), splits=splits))
    own = ms(forward_ms / 2)
    count = len(model.blocks)
    return ComputeTimes(
        operators=tuple(times),
        unattributed=OperatorTime(forward=ms(forward_ms / 2 * count), backward=ms(forward_ms * count)),
        optimizer_s_per_byte=0.0,
        blocks=(own,) * count,
    )


def ms(per_sample: float) -> LinearInBatch:
    return LinearInBatch(per_sample=per_sample * 1e-3)


def compute_s(times: ComputeTimes, batch_size: int) -> float:
    """Seconds of forward and backward of the plain module."""
    return sum(pass_times(times, batch_size))
