"""The traced model as numbers: what its operators hold, and what one training step keeps alive at which time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal

from pydantic import Field, model_validator

from lightning_osdp.planning.spec.frozen import Count, Finite, FrozenModel, NonNegative, Size
from lightning_osdp.planning.spec.tensor import TensorCandidate, TensorUse, index_candidates

SMALL_PARAMETER_ELEMENTS = 1 << 14
"""Smaller 1-D parameters (norms, biases) are never sharded: their gradients are all-reduced in buckets. [M-cost-1]"""

WHOLE_MODEL = ""
"""Name of the operator that is the LightningModule itself."""

NOT_USED = "not used in the traced step"
"""Why parameters that no operator reads are replicated."""

MAY_NOT_RUN = "so that it may not run on every rank"
"""Why operators are replicated that may depend on the data of a rank."""

UNATTRIBUTED = -1
"""``Moment.operator`` of work that belongs to no operator (attention, activations, the loss)."""

Phase = Literal["forward", "backward"]

ComputeDtype = Literal["", "bfloat16", "float16"]
"""A type that autocast computes in, by torch's name; empty for none."""

LookedUp = Literal["", "alone", "beside products"]
"""Whether a table is read for rows, which alone may be read of it, or products read casts of it as well."""

ReduceDtype = Literal["", "float32", "bfloat16"]
"""A type in which gradients are reduced over the ranks; empty for their own."""

REDUCE_BYTES: dict[ReduceDtype, int] = {"": 0, "float32": 4, "bfloat16": 2}
"""``ParameterInfo.reduce_element_bytes`` by type."""


class LinearInBatch(FrozenModel):
    """A quantity that grows linearly with the batch size: ``fixed + per_sample * batch_size``."""

    fixed: Finite = 0.0
    per_sample: Finite = 0.0

    def value_at(self, batch_size: int) -> float:
        """Return the value at ``batch_size`` samples, never less than zero."""
        return max(0.0, self.fixed + self.per_sample * batch_size)

    def scale(self, factor: float) -> LinearInBatch:
        """Return ``factor`` times this quantity."""
        return LinearInBatch(fixed=self.fixed * factor, per_sample=self.per_sample * factor)

    def plus(self, other: LinearInBatch) -> LinearInBatch:
        """Return the sum of both quantities."""
        return LinearInBatch(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)


class ParameterInfo(FrozenModel):
    """One parameter tensor, counted once however many names it has."""

    name: str
    aliases: tuple[str, ...] = ()
    """Its other names, if weights are tied."""
    shape: tuple[Size, ...]
    element_bytes: Count = 4
    trainable: bool = True
    optimizer_bytes: Size = 0
    """Optimizer state of the unsharded parameter, as the module's own optimizer allocates it."""
    gradient_order: int = 0
    """Position of its gradient in the operator's backward; gradients with equal positions exist at the same time."""
    cast_element_bytes: Size = 0
    """Bytes per element in autocast's type if only casts to it, and rows, are read of it; 0 if it is read as it is."""
    reduce_element_bytes: Size = 0
    """Bytes per element in which its gradient is reduced over the ranks; 0 for its own."""
    read_in_backward: bool = True
    """Whether the operator's backward reads it, or its cast."""
    looked_up: LookedUp = ""
    """Whether rows are looked up in it under autocast, for which a replicated one needs no cast."""
    later_quarters: Size = 0
    """Quarters of the operators that share its unit whose gradients come later than this one (``wrapping``)."""

    @property
    def num_elements(self) -> int:
        """Number of elements of the unsharded tensor."""
        return prod(self.shape)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return self.num_elements * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its unsharded gradient; 0 if it is frozen."""
        return self.parameter_bytes if self.trainable else 0

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the unsharded tensor in the type in which it is gathered: autocast's, if it is read so."""
        return self.num_elements * (self.cast_element_bytes or self.element_bytes)

    @property
    def reduced_bytes(self) -> int:
        """Bytes in which its unsharded gradient is reduced; 0 if it is frozen."""
        return self.num_elements * (self.reduce_element_bytes or self.element_bytes) if self.trainable else 0

    @property
    def state_bytes(self) -> int:
        """Parameter, gradient and optimizer state together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def is_small(self) -> bool:
        """Return whether it stays replicated in every mode (see ``SMALL_PARAMETER_ELEMENTS``)."""
        return len(self.shape) <= 1 and self.num_elements < SMALL_PARAMETER_ELEMENTS


class Operator(FrozenModel):
    """A module whose parameters are used only inside its own forward; plans decide for each operator."""

    name: str
    """Dotted path of the module; ``WHOLE_MODEL`` for parameters that the training step itself uses."""
    kind: str
    parameters: tuple[ParameterInfo, ...]
    calls: Count = 1
    """How often it runs in one forward pass."""
    replicated_reason: str = ""
    """Why it must stay replicated, in words for the user; empty if it may be sharded."""
    tied: bool = False
    """Whether operators inside it share its parameters (an embedding and a head)."""
    flops_per_sample: NonNegative = 0.0
    """Forward and backward together."""
    split_dims: tuple[Size, ...] = ()
    """Dimensions along which its weight may be cut, the best first: over ranks, and into slices if it can be split."""
    unsplittable_reason: str = ""
    """Why it can't be split, in words for the user; empty if it can, or if that was not looked at."""
    output_dims: tuple[Size, ...] = ()
    """Dimensions of ``split_dims`` that slice its output; the others slice its input."""
    input_per_sample: NonNegative = 0.0
    """Bytes per sample of the gradient of its input; known if it can be split."""
    output_per_sample: NonNegative = 0.0
    """Bytes per sample of its output; known if it can be split."""
    frees_input: bool = False
    """Whether its backward is the last to read its input, which is freed then; known if it can be split."""
    compute_dtype: ComputeDtype = ""
    """Autocast's type if all its large parameters are read by casts to it, or for rows; empty if any is read as it is.
    """
    num_wrapped: Count = 1
    """Number of operators of one block that this operator stands for, because they share a unit (``wrapping``)."""
    tensor: TensorUse | None = None
    """How it may be tensor parallel (``ModelProfile.with_tensor_candidates`` sets it); None if it may not."""

    @property
    def weight(self) -> ParameterInfo | None:
        """The parameter that slices divide; None if there is none, or if it is too small to be sharded."""
        return next((p for p in self.shardable_parameters if p.name.rpartition(".")[2] == "weight"), None)

    @property
    def shardable_parameters(self) -> tuple[ParameterInfo, ...]:
        """The parameters in its unit if it is sharded: all but the small ones."""
        return () if self.replicated_reason else tuple(p for p in self.parameters if not p.is_small)

    @property
    def is_shardable(self) -> bool:
        """Return whether any of its parameters can be sharded."""
        return bool(self.shardable_parameters)

    @property
    def num_parameters(self) -> int:
        """Number of elements of all its parameters."""
        return sum(p.num_elements for p in self.parameters)

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for operators of equal cost, tensor parallel or not."""
        return (*self.sharding_signature, self.tensor)

    @property
    def sharding_signature(self) -> tuple[object, ...]:
        """A key that is equal for operators of equal cost where they are not tensor parallel.

        These have the same class, and the same parameters except for their names.
        """
        shapes = tuple(
            (p.shape, p.trainable, p.optimizer_bytes, p.gradient_order, p.later_quarters, *_reading(p))
            for p in self.parameters
        )
        sharding = (self.calls, bool(self.replicated_reason), self.tied, self.split_dims, self.num_wrapped)
        return (self.kind, shapes, sharding, self.flops_per_sample)


def _reading(parameter: ParameterInfo) -> tuple[object, ...]:
    own, cast, reduced = parameter.element_bytes, parameter.cast_element_bytes, parameter.reduce_element_bytes
    return own, cast, reduced, parameter.read_in_backward, parameter.looked_up


class Moment(FrozenModel):
    """One stretch of a training step, in order of time: an operator's forward or backward, or the work in between."""

    phase: Phase
    operator: int
    """Index into ``ModelProfile.operators``, or ``UNATTRIBUTED``."""
    live: LinearInBatch
    """Largest sum of live bytes in this stretch, over tensors that are neither parameters, parameter gradients,
    optimizer states nor buffers: activations kept for backward, temporaries, the batch itself."""
    within: tuple[Size, ...] = ()
    """Operators that enclose others, as indices, in the run of whose modules this lies."""
    before_gradients: bool = False
    """Whether it is the part of an operator's backward before its large parameters have gradients of their own type:
    products under autocast make them in its type."""
    later_quarters: Size = 0
    """``ParameterInfo.later_quarters`` of the operator that shares a unit, in its backward."""


class RepeatedBlock(FrozenModel):
    """One of several equal modules that run one after the other: its activations may be recomputed in backward."""

    name: str
    kind: str
    """Description that equal blocks share, for the user: ``Block in model.blocks``."""
    operators: tuple[int, ...]
    """Operators that run in it, as indices into ``ModelProfile.operators``."""
    forward: tuple[int, int]
    """First and last moment of its forward."""
    backward: tuple[int, int]
    """First and last moment of its backward."""
    recompute_saves: LinearInBatch
    """Bytes that recomputing frees between forward and backward: what the forward keeps beyond the block's output, less
    ``kept_inputs``."""
    kept_inputs: LinearInBatch = LinearInBatch()
    """Bytes of inputs that recomputing keeps until the backward ends, and that are freed before it otherwise."""
    live_before_forward: LinearInBatch = LinearInBatch()
    live_before_backward: LinearInBatch = LinearInBatch()
    unattributed_flops_per_sample: NonNegative = 0.0
    """Flops of its forward that belong to no operator."""
    recompute_blocker: str = ""
    """Why it can't be recomputed, in words for the user; empty if it can."""


CheckpointMemory = Literal["nothing", "streamed", "gathered"]
"""Sharded tensors that a rank gathers to save a checkpoint: none, one after the other, or all at once."""


class NonTrainingWork(FrozenModel):
    """Work between training steps that needs memory."""

    checkpoint_memory: CheckpointMemory = "nothing"
    evaluation_batch_size: Size = 0
    """Samples per device in the largest evaluation batch; 0 if the plan's batch size decides it, or without
    evaluation."""
    copied_bytes: Size = 0
    """Copies of the module that callbacks will put on the device (averages of weights)."""
    gathers_parameters: bool = False
    """Whether callbacks gather all parameters at once, to average them."""

    @property
    def has_own_evaluation_batch_size(self) -> bool:
        """Return whether evaluation and training may use different batch sizes."""
        return self.evaluation_batch_size > 0


NO_NON_TRAINING_WORK = NonTrainingWork()


class OptimizerStep(FrozenModel):
    """Temporaries of the optimizer's step, as bytes per byte of parameter."""

    temporary_factor: NonNegative = 0.0
    temporaries_of: Literal["largest", "total"] = "largest"
    """``largest``: parameters are updated one by one, so the largest counts; ``total``: all at once (foreach)."""
    per_parameter: bool = False
    """Whether parameters may be updated one by one, at different times, without temporaries."""
    in_backward: bool = False
    """Whether sharded parameters are updated as soon as their gradients are reduced, and the gradients freed."""


class ModelProfile(FrozenModel):
    """A LightningModule and its batch, read by ``profiling.tracing`` without allocating either."""

    fingerprint: str
    """Hash of the operators and of the parameters' names, shapes and dtypes; a plan must have the same."""
    operators: tuple[Operator, ...]
    """Operators in the order of their first use; every parameter is in exactly one."""
    moments: tuple[Moment, ...]
    buffer_bytes: Size = 0
    optimizer_step: OptimizerStep = OptimizerStep()
    reduce_dtype: ReduceDtype = ""
    """Type in which gradients are reduced."""
    batch_size: Count
    """Samples in the traced batch, as the user's own loader gives it."""
    only_batch_size: Size = 0
    """Batch size at which alone the step works, as with a state of so many rows; 0 if it works at others, too."""
    unattributed_flops_per_sample: NonNegative = 0.0
    """Forward and backward flops that belong to no operator, mostly attention's matrix products."""
    blocks: tuple[RepeatedBlock, ...] = ()
    """Repeated blocks in the order in which they run; none lies in another."""
    evaluation: tuple[Moment, ...] = ()
    """Moments of the same forward without autograd; empty if they are not known."""
    tensor_candidates: tuple[TensorCandidate, ...] = ()
    """What may be tensor parallel. An operator is in one of them at most."""
    knows_tensor_parallelism: bool = False
    """Whether it was looked for what may be tensor parallel."""
    tensor_refusals: dict[str, str] = Field(default_factory=dict)
    """Why operators can't be tensor parallel, in words for the user, by name; for those of a kind that can be."""
    tensor_group_refusals: dict[str, str] = Field(default_factory=dict)
    """Why operators can't be tensor parallel with those that they feed or that feed them, by name: the others, and why
    not with them."""

    @model_validator(mode="after")
    def _check_indices(self) -> ModelProfile:
        count, last = len(self.operators), len(self.moments) - 1
        moments = (*self.moments, *self.evaluation)
        if any(not UNATTRIBUTED <= each < count for moment in moments for each in (moment.operator, *moment.within)):
            raise ValueError(f"a moment's operator is none of {count}")
        for block in self.blocks:
            if any(not 0 <= operator < count for operator in block.operators):
                raise ValueError(f"an operator of the block {block.name} is none of {count}")
            if any(not 0 <= first <= end <= last for first, end in (block.forward, block.backward)):
                raise ValueError(f"a moment of the block {block.name} is none of {last + 1}")
        names = {operator.name for operator in self.operators}
        if unknown := [name for name in index_candidates(self.tensor_candidates) if name not in names]:
            raise ValueError(f"tensor_candidates: {unknown[0]} is no operator")
        return self

    def with_reduce_dtype(self, dtype: ReduceDtype) -> ModelProfile:
        """Return a copy whose gradients are reduced in ``dtype``."""
        changes = {"reduce_element_bytes": REDUCE_BYTES[dtype]}
        operators = tuple(
            each.model_copy(update={"parameters": tuple(p.model_copy(update=changes) for p in each.parameters)})
            for each in self.operators
        )
        return self.model_copy(update={"operators": operators, "reduce_dtype": dtype})

    def with_tensor_candidates(
        self,
        candidates: Iterable[TensorCandidate],
        refusals: Mapping[str, str] | None = None,
        group_refusals: Mapping[str, str] | None = None,
    ) -> ModelProfile:
        """Return a copy whose operators may be tensor parallel as ``candidates`` say.

        Args:
            candidates: What may be tensor parallel.
            refusals: Why other operators can't be, by name.
            group_refusals: Why operators can't be together with others, by name.

        Raises:
            ValueError: A candidate's operator is none of this model, or is in two of them.
        """
        candidates = tuple(candidates)
        places = index_candidates(candidates)
        operators = tuple(
            operator.model_copy(update={"tensor": place[0].use(place[1]) if place else None})
            for operator in self.operators
            for place in (places.get(operator.name),)
        )
        changes = {
            "tensor_candidates": candidates,
            "knows_tensor_parallelism": True,
            "tensor_refusals": dict(refusals or {}),
            "tensor_group_refusals": dict(group_refusals or {}),
            "operators": operators,
        }
        return ModelProfile.model_validate(dict(self) | changes)

    def has_moments_of(self, other: ModelProfile) -> bool:
        """Return whether both run the same operators and blocks in the same order."""

        def order(profile: ModelProfile) -> list[object]:
            places = [(each.phase, each.operator) for each in profile.moments]
            return [*places, *(each.name for each in profile.operators), *(each.name for each in profile.blocks)]

        return order(self) == order(other)

    @property
    def low_precision_shapes(self) -> set[tuple[int, ...]]:
        """Return the different shapes of weights that products in 16 bits read."""
        weights = (p for operator in self.operators for p in operator.parameters if len(p.shape) > 1)
        return {p.shape for p in weights if (p.cast_element_bytes or p.element_bytes) == 2 and p.looked_up != "alone"}

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, tied ones once."""
        return sum(op.num_parameters for op in self.operators)

    @property
    def flops_per_sample(self) -> float:
        """Flops of one training step's forward and backward."""
        return self.unattributed_flops_per_sample + sum(op.flops_per_sample for op in self.operators)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters, tied ones once."""
        return sum(p.parameter_bytes for op in self.operators for p in op.parameters)
