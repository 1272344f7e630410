"""The model as numbers: what its operators hold, and what one training step keeps alive and when."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SMALL_PARAMETER_ELEMENTS = 1 << 14
"""1-D parameters (norms, biases) below this size are never collectives of their own: they stay replicated and are
reduced in buckets. [empirical: on gloo a 64 KiB all-gather takes hardly longer than an empty one]"""

WHOLE_MODEL = ""
"""Name of the scope that is the LightningModule itself."""

UNATTRIBUTED = -1
"""``Moment.operator`` of work that belongs to no operator (attention, activations, the loss)."""

SPLIT_PARAMETER = "weight"
"""Name, within its operator, of the one parameter that slices divide."""

Phase = Literal["forward", "backward"]


class FrozenModel(BaseModel):
    """A value: immutable, comparable, with JSON in and out; unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinearInBatch(FrozenModel):
    """A quantity that grows linearly with the batch size: ``fixed + per_sample * batch_size``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def value_at(self, batch_size: int) -> float:
        """Value at ``batch_size`` samples, never negative."""
        return max(0.0, self.fixed + self.per_sample * batch_size)

    def scale(self, factor: float) -> LinearInBatch:
        """So many times as much at every batch size."""
        return LinearInBatch(fixed=self.fixed * factor, per_sample=self.per_sample * factor)

    def plus(self, other: LinearInBatch) -> LinearInBatch:
        """The sum at every batch size."""
        return LinearInBatch(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)


class ParameterInfo(FrozenModel):
    """One parameter tensor, counted once however many names it has."""

    name: str
    """First dotted name in ``named_parameters`` order."""
    aliases: tuple[str, ...] = ()
    """Its other names, where weights are tied."""
    shape: tuple[int, ...]
    element_bytes: int = 4
    trainable: bool = True
    optimizer_bytes: int = 0
    """Bytes of optimizer state for the whole parameter, as the module's own optimizer allocates them."""
    gradient_order: int = 0
    """When its gradient is made, among those of its operator: of the same turn all are there at once."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its whole gradient; 0 if it is frozen."""
        return self.parameter_bytes if self.trainable else 0

    @property
    def state_bytes(self) -> int:
        """Parameter, gradient and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def is_small(self) -> bool:
        """Whether it stays replicated in every mode (see SMALL_PARAMETER_ELEMENTS)."""
        return len(self.shape) <= 1 and self.num_elements < SMALL_PARAMETER_ELEMENTS


class Operator(FrozenModel):
    """A module whose parameters are used only inside its own forward: the unit of decision."""

    name: str
    """Dotted path of the module; ``WHOLE_MODEL`` for parameters that the training step itself uses."""
    kind: str
    """Class name of the module."""
    parameters: tuple[ParameterInfo, ...]
    calls: int = 1
    """How often it runs in one forward pass."""
    replicated_reason: str = ""
    """Why it must stay replicated, in words for the user; empty if it may be sharded."""
    tied: bool = False
    """Whether its parameters are those that operators inside of it have in common (an embedding and a head)."""
    flops_per_sample: float = 0.0
    """Of forward and backward together."""
    split_dims: tuple[int, ...] = ()
    """Dimensions of its weight that slices may divide, the best first; empty if it can't be split."""
    unsplittable_reason: str = ""
    """Why it can't be split, in words for the user; empty if it can, or if nobody looked."""

    output_dims: tuple[int, ...] = ()
    """Those of ``split_dims`` that slice its output; the others slice its input."""
    input_per_sample: float = 0.0
    """Bytes of its input's gradient, for each sample; known if it can be split."""
    output_per_sample: float = 0.0
    """Bytes of its output, for each sample; known if it can be split."""
    num_wrapped: int = 1
    """How many operators of one block it stands for: they share a unit (``joining``)."""

    @property
    def weight(self) -> ParameterInfo | None:
        """What slices divide; None if it has no such parameter, or that is too small to be sharded."""
        found = (p for p in self.shardable_parameters if p.name.rpartition(".")[2] == SPLIT_PARAMETER)
        return next(found, None)

    @property
    def shardable_parameters(self) -> tuple[ParameterInfo, ...]:
        """Those that a unit takes when the operator is sharded: all but the small ones."""
        return () if self.replicated_reason else tuple(p for p in self.parameters if not p.is_small)

    @property
    def is_shardable(self) -> bool:
        """Whether it has anything to shard."""
        return bool(self.shardable_parameters)

    @property
    def num_parameters(self) -> int:
        """Elements of all its parameters."""
        return sum(p.num_elements for p in self.parameters)

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for operators that cost the same: same class, same parameters but for their names."""
        shapes = tuple(
            (p.shape, p.element_bytes, p.trainable, p.optimizer_bytes, p.gradient_order) for p in self.parameters
        )
        sharding = (self.calls, bool(self.replicated_reason), self.tied, self.split_dims, self.num_wrapped)
        return (self.kind, shapes, sharding, self.flops_per_sample)


class Moment(FrozenModel):
    """One stretch of a training step, in the order of time: an operator's forward or backward, or what lies between."""

    phase: Phase
    operator: int
    """Index into ``ModelProfile.operators``, or ``UNATTRIBUTED``."""
    live: LinearInBatch
    """Largest sum of live bytes during the moment, over tensors that are neither parameters, parameter gradients,
    optimizer states nor buffers: activations kept for backward, temporaries, the batch itself."""


class RepeatedBlock(FrozenModel):
    """One of several alike modules that run one after the other: its activations may be computed again in backward."""

    name: str
    """Dotted path of the module."""
    kind: str
    """What it has in common with its like, for the user: ``Block in model.blocks``."""
    operators: tuple[int, ...]
    """Those that run in it, as indices into ``ModelProfile.operators``."""
    forward: tuple[int, int]
    """First and last moment of its forward."""
    backward: tuple[int, int]
    """First and last moment of its backward."""
    recompute_saves: LinearInBatch
    """Bytes that its forward leaves for its backward, beyond its output: what recomputing frees in between."""
    live_before_forward: LinearInBatch = LinearInBatch()
    """Live bytes when its forward begins."""
    live_before_backward: LinearInBatch = LinearInBatch()
    """Live bytes when its backward begins."""
    unattributed_flops_per_sample: float = 0.0
    """Of its forward, for work that belongs to no operator."""
    recompute_blocker: str = ""
    """Why it can't be recomputed, in words for the user; empty if it can."""


CheckpointMemory = Literal["nothing", "streamed", "gathered"]
"""What a rank makes whole of sharded tensors to save a checkpoint: nothing, one after the other, or all at once."""


class NonTrainingWork(FrozenModel):
    """What a run does between its training steps, as far as that takes memory."""

    checkpoint_memory: CheckpointMemory = "nothing"
    evaluation_batch_size: int = 0
    """Samples per device in the largest batch that is evaluated, if that does not follow from the plan's batch size;
    else 0, or if nothing is evaluated."""

    @property
    def has_own_evaluation_batch_size(self) -> bool:
        """Whether it evaluates in batches of another size than it trains in."""
        return self.evaluation_batch_size > 0


NO_NON_TRAINING_WORK = NonTrainingWork()


class OptimizerStep(FrozenModel):
    """Temporaries of the optimizer's step, as bytes per byte of parameter."""

    temporary_factor: float = 0.0
    temporaries_of: Literal["largest", "total"] = "largest"
    """``largest``: parameters are updated one by one, so the largest counts; ``total``: all at once (foreach)."""
    per_parameter: bool = False
    """Whether parameters may be updated one by one, at different times, without temporaries."""
    in_backward: bool = False
    """Whether that is done: sharded parameters are updated as soon as their gradients are reduced, which are freed."""


class ModelProfile(FrozenModel):
    """A LightningModule and its batch, read by ``profiling.trace`` without allocating either."""

    fingerprint: str
    """Of the parameters' names, shapes and dtypes and of the operators: what a plan must match."""
    operators: tuple[Operator, ...]
    """In the order of their first use; every parameter is in exactly one."""
    moments: tuple[Moment, ...]
    buffer_bytes: int = 0
    optimizer_step: OptimizerStep = OptimizerStep()
    batch_size: int
    """Samples in the batch that was traced: what the user's own loader gives."""
    unattributed_flops_per_sample: float = 0.0
    """Of forward and backward together, for work that belongs to no operator: attention's products above all."""
    blocks: tuple[RepeatedBlock, ...] = ()
    """Repeated blocks, in the order in which they run; none lies in another."""
    evaluation: tuple[Moment, ...] = ()
    """Moments of the same forward without autograd, which keeps nothing for a backward; empty if it is not known."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(op.num_parameters for op in self.operators)

    @property
    def flops_per_sample(self) -> float:
        """Of one training step's forward and backward together."""
        return self.unattributed_flops_per_sample + sum(op.flops_per_sample for op in self.operators)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(p.parameter_bytes for op in self.operators for p in op.parameters)
