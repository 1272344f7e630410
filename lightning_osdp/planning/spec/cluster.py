"""The hardware as numbers: ranks, the time of each collective, and the measured compute time of operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, model_validator

from lightning_osdp.planning.spec.files import parse_json
from lightning_osdp.planning.spec.frozen import Count, FrozenModel, NonNegative, Seconds, Size
from lightning_osdp.planning.spec.model import UNATTRIBUTED, LinearInBatch, ModelProfile, Moment
from lightning_osdp.planning.spec.plan_v1 import raise_negative_times, upgrade_cluster

MAX_CORRECTION = 3.0
"""Trials change what was measured in parts by at most this factor."""

BUCKET_BYTES = {"cpu": 2 << 20, "cuda": 25 << 20}
"""By device type: replicated gradients are copied into buckets of up to this size, on CUDA that of PyTorch's DDP. The
last one is reduced when nothing is left to compute. [M-cost-13]"""

UNBUCKETED_BYTES = {"cpu": 1 << 20, "cuda": BUCKET_BYTES["cuda"]}
"""By device type: larger replicated gradients are all-reduced in place, without a bucket. [M-cost-2]"""


def size_on(device_type: str, sizes: Mapping[str, int]) -> int:
    """Return the size for a type of device: that of CUDA, unless the type has its own."""
    return sizes.get(device_type, sizes["cuda"])


class CollectiveFit(FrozenModel):
    """Latency and inverse bandwidth of one collective, fitted to measurements.

    ``time_s = (N - 1) (latency_s + s_per_byte * P / N)`` for an unsharded tensor of P bytes on N ranks: the paper's
    equation 2 for one ring pass, with its own constants for each collective.
    """

    latency_s: Seconds
    s_per_byte: Seconds
    extra_tensor_latency_s: Seconds = 0.0
    """Latency of each further tensor that is gathered or reduced in the same call."""
    overlap_fraction: float = Field(ge=0, le=1, default=0.0)
    """Fraction of its time that compute can hide, if it starts before its result is needed: always for all-reduces, for
    the others only if units are prefetched (``Cluster.prefetch_max_bytes``)."""
    residual: NonNegative = 0.0
    """Root mean square of (predicted - measured) / measured over the measured sizes."""

    def time_s(self, unsharded_bytes: float, ranks: int, tensors: int = 1) -> float:
        """Return the seconds for ``tensors`` tensors of ``unsharded_bytes`` in total; 0 on a single rank."""
        latency_s = self.latency_s + (tensors - 1) * self.extra_tensor_latency_s
        return (ranks - 1) * (latency_s + self.s_per_byte * unsharded_bytes / ranks)

    def overlapped_part(self) -> CollectiveFit:
        """Return a fit for the part of the time that compute can hide."""
        names = ("latency_s", "s_per_byte", "extra_tensor_latency_s")
        return self.model_copy(update={name: self.overlap_fraction * getattr(self, name) for name in names})


class Link(FrozenModel):
    """The connection between ranks, with one fit for each collective that the engine uses."""

    all_reduce: CollectiveFit
    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit
    all_to_all: CollectiveFit = Field(default_factory=lambda data: data["all_gather"])
    """Each rank sends every other one P / N bytes, as in an all-gather, whose fit it has if it was not measured."""


class ShardingLink(FrozenModel):
    """Fits of the collectives that exchange sharded states."""

    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit
    all_to_all: CollectiveFit = Field(default_factory=lambda data: data["all_gather"])


class HierarchicalLinks(FrozenModel):
    """The links inside nodes and between them, if there are several nodes with several devices each."""

    intra_node: ShardingLink
    """Collectives among the ranks of a node, in all nodes at the same time."""
    inter_node: CollectiveFit
    """All-reduce among the ranks with the same index in their nodes, for all indices at the same time. It overlaps the
    backward pass."""
    hierarchical: ShardingLink
    """Collectives of all ranks in two stages: inside nodes and between them."""


class ModeOverhead(FrozenModel):
    """Time of the engine for one operator in one micro-batch, without compute and collectives."""

    fixed_s: Seconds = 0.0
    s_per_byte: Seconds = 0.0
    """Time per byte of parameter: copies into buckets, first touches of memory."""

    def time_s(self, parameter_bytes: float) -> float:
        """Return the seconds for an operator with ``parameter_bytes``."""
        return self.fixed_s + self.s_per_byte * parameter_bytes


RelativeChange = Annotated[float, Field(gt=-1, allow_inf_nan=False)]
"""A fraction by which something takes longer. Fits are not negative, but those of earlier releases may be."""


class CalibrationFactors(FrozenModel):
    """How much longer collectives and engine take in whole steps than the sum of their parts, relative to that sum.

    Trials determine these factors (``trial_correction.fit_calibration``). Those of all kinds that apply to an operator
    add up. Together they are never negative: a plan that takes less than its parts is predicted by its own trial.
    """

    dp: RelativeChange = 0.0
    zdp2: RelativeChange = 0.0
    zdp: RelativeChange = 0.0
    tp: RelativeChange = 0.0
    wrapped: RelativeChange = 0.0
    """Units that several operators share."""
    split: RelativeChange = 0.0
    """Operators cut into slices."""
    node: RelativeChange = 0.0
    """Operators sharded inside nodes."""
    hierarchical: RelativeChange = 0.0
    """Operators sharded over all ranks with two-stage collectives."""

    def for_kinds(self, kinds: Iterable[str]) -> float:
        """Return the excess of an operator of these ``step_time.calibration_kinds``, limited by ``MAX_CORRECTION``."""
        factor: float = 1.0 + sum(getattr(self, kind) for kind in kinds)
        return min(MAX_CORRECTION, max(1.0, factor)) - 1.0


class EngineOverhead(FrozenModel):
    """Measured time of the engine by mode, beyond what the fits of the collectives say."""

    dp: ModeOverhead = ModeOverhead()
    """Overhead of a parameter whose gradient is copied into a bucket."""
    zdp2: ModeOverhead = ModeOverhead()
    zdp: ModeOverhead = ModeOverhead()
    tp: ModeOverhead = ModeOverhead()
    """Overhead of operators that are tensor parallel together, and per byte of their collectives."""
    calibration: CalibrationFactors = CalibrationFactors()


NO_ENGINE_OVERHEAD = EngineOverhead()


class Cluster(FrozenModel):
    """Nodes, devices and links."""

    nodes: Count = 1
    """Number of nodes with equally many devices, ranks numbered node by node; 1 if they differ."""
    devices_per_node: Count
    devices_by_node: tuple[Count, ...] = ()
    """Devices of each node if their numbers differ; ``devices_per_node`` is their sum then."""
    device: str
    """Type and name of one device: ``cpu``, ``cuda: NVIDIA H200``."""
    backend: str
    """Backend of the process group that was measured: ``gloo``, ``nccl``."""
    link: Link
    """Collectives of all ranks."""
    hierarchical_links: HierarchicalLinks | None = None
    """None if there is a single level, or if it was not measured; operators are sharded over all ranks then."""
    overlap: float = Field(ge=0, le=1, default=0.0)
    """Fraction of an operator's compute time that can hide its communication (CUDA)."""
    prefetch_max_bytes: Size = 0
    """Largest unit that is gathered while the unit before it computes, and whose gradients are reduced while the next
    one computes (CPU); 0 without prefetching."""
    reduce_scatter_copy_factor: NonNegative = 1.0
    """Extra bytes that a reduce-scatter allocates, as a fraction of the unsharded tensor."""
    reduce_scatter_buffer_bytes: Size = 0
    """Upper limit of a reduce-scatter's receive buffers, which hold one or two parts of smaller tensors."""
    all_reduce_buffer_bytes: Size = 0
    """Upper limit of the extra bytes that all-reduces in flight allocate."""
    unit_bytes: Size = 0
    """What each unit takes in a rank's memory besides tensors: objects, hooks, nodes of autograd (CPU)."""
    tensor_bytes: Size = 0
    """What each gradient and each state of an optimizer takes besides its elements (CPU)."""
    page_bytes: Size = 0
    """Size of the pages on which large tensors lie, each on its own (CPU)."""
    engine: EngineOverhead = NO_ENGINE_OVERHEAD

    @model_validator(mode="after")
    def _check_devices(self) -> Cluster:
        if self.devices_by_node and (self.nodes != 1 or sum(self.devices_by_node) != self.devices_per_node):
            raise ValueError(
                f"devices_by_node {self.devices_by_node} needs nodes=1 and devices_per_node={sum(self.devices_by_node)}"
            )
        return self

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Read a cluster file of this or an earlier release.

        Raises:
            ValueError: ``text`` is not JSON or does not describe a cluster.
        """
        data = raise_negative_times(upgrade_cluster(parse_json(text)))
        return cls.model_validate_json(json.dumps(data), strict=True)

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def device_type(self) -> str:
        """Type of the devices: ``cpu`` or ``cuda``."""
        return self.device.split(":")[0]

    @property
    def is_hierarchical(self) -> bool:
        """Return whether there are several nodes with several devices each."""
        return self.nodes > 1 and self.devices_per_node > 1

    @property
    def uses_ring_collectives(self) -> bool:
        """Return whether the engine gathers and reduces with its own rings instead of the backend's collectives."""
        return self.backend == "gloo" and self.device == "cpu"

    def with_overlap(self, fraction: float) -> Cluster:
        """Return a copy in which compute can hide this fraction of each collective's time."""

        def overlap(links: Any) -> Any:
            own = {"overlap_fraction": fraction}
            fits = {name: getattr(links, name) for name in type(links).model_fields}
            return links.model_copy(
                update={
                    name: fit.model_copy(update=own) if isinstance(fit, CollectiveFit) else overlap(fit)
                    for name, fit in fits.items()
                }
            )

        hierarchical = self.hierarchical_links and overlap(self.hierarchical_links)
        return self.model_copy(update={"link": overlap(self.link), "hierarchical_links": hierarchical})

    @property
    def supports_prefetch(self) -> bool:
        """Return whether collectives of all ranks may run beside compute: not where some share a link [M-cost-3]."""
        return self.ranks > 1 and not self.is_hierarchical and not self.devices_by_node

    @property
    def supports_prefetch_in_nodes(self) -> bool:
        """Return whether collectives inside nodes may run beside compute, among several nodes."""
        return self.is_hierarchical and self.devices_per_node > 1

    @property
    def has_streams(self) -> bool:
        """Return whether collectives run on streams of the device, which the host is ahead of (CUDA)."""
        return self.device_type == "cuda" and self.ranks > 1

    @property
    def coalesces_gradients(self) -> bool:
        """Return whether a unit's small gradients are reduce-scattered in one call."""
        return self.device_type == "cpu" and self.supports_prefetch

    @property
    def unbucketed_bytes(self) -> int:
        """Size from which a replicated gradient is all-reduced in place."""
        return size_on(self.device_type, UNBUCKETED_BYTES)

    @property
    def bucket_bytes(self) -> int:
        """Largest size of a bucket of replicated gradients."""
        return size_on(self.device_type, BUCKET_BYTES)

    @property
    def allocates_on_write(self) -> bool:
        """Return whether a new tensor takes memory only as it is written to (CPU pages), not at once (CUDA)."""
        return self.device_type == "cpu"


def _check_line(line: LinearInBatch) -> LinearInBatch:
    if min(line.fixed, line.per_sample) < 0:
        raise ValueError("a time can't be negative")
    return line


TimeLine = Annotated[LinearInBatch, AfterValidator(_check_line)]
"""Seconds by batch size, never negative."""


class SplitTime(FrozenModel):
    """Compute time that splitting an operator adds in one micro-batch, in seconds by batch size."""

    dim: Size
    """Dimension of the weight that the slices divide."""
    slices: Count
    forward: TimeLine
    backward: TimeLine


class TensorTime(FrozenModel):
    """Compute time of one slice of an operator for the samples of its whole group, by the batch size of one rank."""

    degree: Count
    forward: TimeLine
    backward: TimeLine


class OperatorTime(FrozenModel):
    """Compute time of one operator in one micro-batch, in seconds by batch size."""

    forward: TimeLine = LinearInBatch()
    backward: TimeLine = LinearInBatch()
    splits: tuple[SplitTime, ...] = ()
    """The ways to split it that were measured; the search considers no others."""
    tensor: tuple[TensorTime, ...] = ()
    """Its slices if it is tensor parallel; those that were not measured are derived from its own times."""

    def seconds_at(self, batch_size: int) -> float:
        """Return the seconds of forward and backward together."""
        return self.forward.value_at(batch_size) + self.backward.value_at(batch_size)

    def map_lines(
        self, forward: Callable[[LinearInBatch], LinearInBatch], backward: Callable[[LinearInBatch], LinearInBatch]
    ) -> OperatorTime:
        """Return a copy with ``forward`` and ``backward`` applied to the times of each pass."""

        def change(time: TimeT) -> TimeT:
            return time.model_copy(update={"forward": forward(time.forward), "backward": backward(time.backward)})

        parts = {"splits": tuple(map(change, self.splits)), "tensor": tuple(map(change, self.tensor))}
        return change(self).model_copy(update=parts)


TimeT = TypeVar("TimeT", SplitTime, TensorTime, OperatorTime)
"""A value with the time of a forward and of a backward."""


class KernelWorkspace(FrozenModel):
    """Bytes that the largest of an operator's kernels allocates while it runs, without inputs and outputs."""

    forward: LinearInBatch = LinearInBatch()
    backward: LinearInBatch = LinearInBatch()


class ComputeTimes(FrozenModel):
    """Measured compute time (the paper's gamma) of each operator, and of the work that belongs to none."""

    operators: tuple[OperatorTime, ...]
    """Aligned with ``ModelProfile.operators``."""
    unattributed: OperatorTime
    optimizer_s_per_byte: Seconds
    """Seconds of the optimizer's step per byte of parameter that a rank updates."""
    blocks: tuple[TimeLine, ...] = ()
    """Aligned with ``ModelProfile.blocks``: forward seconds in each that belong to no operator, a part of
    ``unattributed``."""
    workspace: tuple[KernelWorkspace, ...] = ()
    """Aligned with ``operators``; empty if it was not measured."""

    def matches(self, model: ModelProfile) -> bool:
        """Return whether these can be the times of ``model``: whether there are as many of each kind."""
        num_operators = len(model.operators)
        return (
            len(self.operators) == num_operators
            and len(self.blocks) in (0, len(model.blocks))
            and len(self.workspace) in (0, num_operators)
        )

    def map_lines(
        self,
        forward: Callable[[LinearInBatch], LinearInBatch],
        backward: Callable[[LinearInBatch], LinearInBatch] | None = None,
    ) -> ComputeTimes:
        """Return a copy with every time changed by ``forward``, those of backward passes by ``backward`` if given."""
        changes = (forward, backward or forward)
        return self.model_copy(
            update={
                "operators": tuple(time.map_lines(*changes) for time in self.operators),
                "unattributed": self.unattributed.map_lines(*changes),
                "blocks": tuple(map(forward, self.blocks)),
            }
        )

    def with_workspace(self, model: ModelProfile) -> ModelProfile:
        """Return ``model`` with the kernels' workspace added to the live bytes of their moments."""
        if not self.workspace:
            return model

        makes_products = {moment.operator for moment in model.moments if moment.before_gradients}

        def add_workspace(moment: Moment) -> Moment:
            is_past = moment.phase == "backward" and not moment.before_gradients and moment.operator in makes_products
            if moment.operator == UNATTRIBUTED or is_past:
                return moment
            own: LinearInBatch = getattr(self.workspace[moment.operator], moment.phase)
            return moment.model_copy(update={"live": moment.live.plus(own)})

        changes = {name: tuple(map(add_workspace, getattr(model, name))) for name in ("moments", "evaluation")}
        return model.model_copy(update=changes)
