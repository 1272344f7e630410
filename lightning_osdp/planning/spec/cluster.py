"""The hardware as numbers: how many ranks, how much memory, and how long each collective takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_osdp.planning.spec.model import UNATTRIBUTED, FrozenModel, LinearInBatch, ModelProfile, Moment

MAX_CORRECTION = 3.0
"""What was measured in parts is changed by this factor at most."""


class CollectiveFit(FrozenModel):
    """Latency and inverse bandwidth of one collective, fitted to measurements.

    ``time_s = (N - 1) (latency_s + s_per_byte * P / N)`` for a tensor of P bytes when whole, on N ranks: the paper's
    equation 2 for one ring pass, with constants of its own for each collective.
    """

    latency_s: float
    s_per_byte: float
    extra_tensor_latency_s: float = 0.0
    """What each further tensor adds to the latency, of several that are gathered or reduced together."""
    overlap_fraction: float = 0.0
    """Share of its seconds that goes on beside compute if it is begun before it is needed, as all-reduces are, and
    others where units run ahead (``Cluster.prefetch_max_bytes``): what the link takes, not the processor."""
    residual: float = 0.0
    """Root mean square of (predicted - measured) / measured over the measured sizes."""

    def time_s(self, unsharded_bytes: float, ranks: int, tensors: int = 1) -> float:
        """Seconds for so many tensors of ``unsharded_bytes`` in all on ``ranks`` ranks; 0 on a single rank."""
        latency_s = self.latency_s + (tensors - 1) * self.extra_tensor_latency_s
        return (ranks - 1) * (latency_s + self.s_per_byte * unsharded_bytes / ranks)

    def overlapped_part(self) -> CollectiveFit:
        """The part that goes on beside compute."""
        parts = {
            name: self.overlap_fraction * getattr(self, name)
            for name in ("latency_s", "s_per_byte", "extra_tensor_latency_s")
        }
        return self.model_copy(update=parts)


class Link(FrozenModel):
    """What the ranks are joined by, one fit for each collective that the engine uses."""

    all_reduce: CollectiveFit
    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit


class ShardingLink(FrozenModel):
    """What sharded states are exchanged by on a way of their own."""

    all_gather: CollectiveFit
    reduce_scatter: CollectiveFit


class HierarchicalLinks(FrozenModel):
    """The links inside nodes and between them, where there are several nodes of several devices."""

    intra_node: ShardingLink
    """Collectives of one node's ranks, in all nodes at the same time."""
    inter_node: CollectiveFit
    """All-reduce of ranks with the same place in their nodes, of all places at the same time. It goes on beside the
    backward pass."""
    hierarchical: ShardingLink
    """Of all ranks, inside nodes and between them."""


class ModeOverhead(FrozenModel):
    """What the engine takes for one operator in one micro-batch beside compute and collectives."""

    fixed_s: float = 0.0
    s_per_byte: float = 0.0
    """Of its parameters: copies into buckets, memory touched for the first time."""

    def time_s(self, parameter_bytes: float) -> float:
        """Seconds for an operator of that size."""
        return self.fixed_s + self.s_per_byte * parameter_bytes


class CalibrationFactors(FrozenModel):
    """By what share the collectives and the engine take more in the module's own step than in parts, as rehearsals have
    shown (``rehearsed``), or as is usual (``engine.process_overhead``). Shares of the same operator add up; below 0 they take
    less."""

    dp: float = 0.0
    zdp2: float = 0.0
    zdp: float = 0.0
    wrapped: float = 0.0
    """Of units that operators share."""
    split: float = 0.0
    """Of slices."""
    node: float = 0.0
    """Of what is sharded inside nodes."""
    hierarchical: float = 0.0
    """Of what is sharded over the world in two stages."""

    def for_kinds(self, kinds: Iterable[str]) -> float:
        """Of an operator of these kinds (``step_time.kinds``), within reason: a machine that was busy teaches nothing."""
        factor: float = 1.0 + sum(getattr(self, kind) for kind in kinds)
        return min(MAX_CORRECTION, max(1 / MAX_CORRECTION, factor)) - 1.0


class EngineOverhead(FrozenModel):
    """The engine's own time by mode, as measured where it runs. It may be negative where the collectives' fits are too
    high: what counts is the sum of both."""

    dp: ModeOverhead = ModeOverhead()
    """Of a parameter that rides in a bucket."""
    zdp2: ModeOverhead = ModeOverhead()
    zdp: ModeOverhead = ModeOverhead()
    calibration: CalibrationFactors = CalibrationFactors()


NO_ENGINE_OVERHEAD = EngineOverhead()
"""Where it was not measured."""


class Cluster(FrozenModel):
    """Nodes, devices and links."""

    nodes: int = 1
    """Of equally many devices, ranks numbered node by node; 1 where that is not so (``devices_by_node``)."""
    devices_per_node: int
    devices_by_node: tuple[int, ...] = ()
    """Devices of each node where their numbers differ; ``devices_per_node`` counts all of them then."""
    device: str
    """Type and name of one device: ``cpu``, ``cuda: NVIDIA H200``."""
    backend: str
    """Of the process group that was measured: ``gloo``, ``nccl``."""
    link: Link
    """Collectives of all ranks."""
    hierarchical_links: HierarchicalLinks | None = None
    """None where there is one level, or where it is not known: then operators are sharded over all ranks."""
    overlap: float = 0.0
    """Share of an operator's compute time that can hide its communication (CUDA)."""
    prefetch_max_bytes: int = 0
    """On a CPU, units of up to this size are gathered while the one before computes, and their gradients reduced while
    the next does. 0: none are."""
    reduce_scatter_copy_factor: float = 1.0
    """Extra bytes that a reduce-scatter takes, as a share of the whole tensor's."""
    reduce_scatter_buffer_bytes: int = 0
    """Extra bytes that a reduce-scatter takes at most, which are one or two parts of smaller tensors."""
    all_reduce_buffer_bytes: int = 0
    """Extra bytes that all-reduces which are under way take at most."""
    engine: EngineOverhead = NO_ENGINE_OVERHEAD

    @property
    def ranks(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def uses_ring_collectives(self) -> bool:
        """Whether gathers and reduce-scatters are this package's own, not the backend's."""
        return self.backend == "gloo" and self.device == "cpu"

    @property
    def is_hierarchical(self) -> bool:
        """Whether a node is neither one device nor all of them."""
        return self.nodes > 1 and self.devices_per_node > 1

    @property
    def supports_prefetch(self) -> bool:
        """Whether messages from each rank to each other take the links no longer than a ring does, which collectives
        beside compute need: not where several ranks of a node share its link.
        [measured, 2 nodes of 2 ranks, 1 Gbit/s, all sharded: 147 MiB out of a node in place of 112, 1.34 s a step in
        place of 1.16]"""
        return self.ranks > 1 and not self.is_hierarchical and not self.devices_by_node


class SplitTime(FrozenModel):
    """What splitting an operator adds to its compute time in one micro-batch, in seconds by batch size: never less than
    nothing, also at batch sizes beyond those that were measured."""

    dim: int
    """Dimension of the weight that the slices divide."""
    slices: int
    forward: LinearInBatch
    backward: LinearInBatch


class OperatorTime(FrozenModel):
    """Compute time of one operator in one micro-batch, in seconds by batch size."""

    forward: LinearInBatch = LinearInBatch()
    backward: LinearInBatch = LinearInBatch()
    splits: tuple[SplitTime, ...] = ()
    """Each way to split it that was measured: only these are offered to the search."""

    def seconds_at(self, batch_size: int) -> float:
        """Forward and backward together, in seconds."""
        return self.forward.value_at(batch_size) + self.backward.value_at(batch_size)

    def map_lines(
        self, forward: Callable[[LinearInBatch], LinearInBatch], backward: Callable[[LinearInBatch], LinearInBatch]
    ) -> OperatorTime:
        """The same with every line of either pass changed."""
        splits = (
            one.model_copy(update={"forward": forward(one.forward), "backward": backward(one.backward)})
            for one in self.splits
        )
        return OperatorTime(forward=forward(self.forward), backward=backward(self.backward), splits=tuple(splits))


class KernelWorkspace(FrozenModel):
    """Bytes that an operator's kernels take while they run, beside what they are given and what they give: weights and
    images in a library's own layout, workspaces. By batch size, the most of its kernels."""

    forward: LinearInBatch = LinearInBatch()
    backward: LinearInBatch = LinearInBatch()


class ComputeTimes(FrozenModel):
    """Measured compute (the paper's gamma): per operator, and everything that belongs to none."""

    operators: tuple[OperatorTime, ...]
    """Aligned with ``ModelProfile.operators``."""
    unattributed: OperatorTime
    optimizer_s_per_byte: float
    """Seconds of the optimizer's step per byte of parameter that a rank updates."""
    blocks: tuple[LinearInBatch, ...] = ()
    """Aligned with ``ModelProfile.blocks``: forward seconds of the work in each that belongs to no operator. It is
    part of ``unattributed``, too."""
    workspace: tuple[KernelWorkspace, ...] = ()
    """Aligned with ``operators``, where it was measured."""

    def map_lines(
        self,
        forward: Callable[[LinearInBatch], LinearInBatch],
        backward: Callable[[LinearInBatch], LinearInBatch] | None = None,
    ) -> ComputeTimes:
        """The same with every line of forward and backward changed; both alike if ``mark_backward`` is None."""
        both = (forward, forward if backward is None else backward)
        return self.model_copy(
            update={
                "operators": tuple(one.map_lines(*both) for one in self.operators),
                "unattributed": self.unattributed.map_lines(*both),
                "blocks": tuple(map(forward, self.blocks)),
            }
        )

    def with_workspace(self, model: ModelProfile) -> ModelProfile:
        """The model with its operators' scratch memory at their moments."""
        if not self.workspace:
            return model

        def add_workspace(moment: Moment) -> Moment:
            own = (
                LinearInBatch()
                if moment.operator == UNATTRIBUTED
                else getattr(self.workspace[moment.operator], moment.phase)
            )
            return moment.model_copy(update={"live": moment.live.plus(own)})

        moments, evaluation = (tuple(map(add_workspace, each)) for each in (model.moments, model.evaluation))
        return model.model_copy(update={"moments": moments, "evaluation": evaluation})
