"""ExecutionPlan: the only hand-over between deciding and doing. JSON in and out."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import FrozenModel, ModelProfile

PLAN_FORMAT = "lightning_osdp.plan"
PLAN_VERSION = 1


class ModelIdentity(FrozenModel):
    """Which model a plan is for."""

    fingerprint: str
    num_parameters: int = Field(ge=0)
    flops_per_sample: float = 0.0
    """Of forward and backward together, each once; 0 if the plan does not say."""


class ChoiceCost(FrozenModel):
    """What an operator costs under one choice, as the search saw it: per rank and optimizer step."""

    slices: tuple[Mode, ...] = Field(min_length=1)
    split_dim: int | None = None
    sharding_group: ShardingScope = ShardingScope.WORLD
    hierarchical: bool = False
    time_s: float
    resident_bytes: int
    """Held when the plan is at its peak, or just before that, the operator's own run apart."""
    transient_bytes: int
    """Held only while the operator runs; of all operators only the largest counts."""

    @property
    def choice(self) -> ShardingChoice:
        """The same without costs."""
        return ShardingChoice(self.slices, self.split_dim, self.sharding_group, self.hierarchical)


class BlockPlan(FrozenModel):
    """What was decided for one repeated block, and what recomputing it brings and costs."""

    name: str
    kind: str
    """What it has in common with its like: ``Block in model.blocks``."""
    recomputed: bool
    recompute_blocker: str = ""
    """Why it can't be recomputed; empty if it can."""
    user_requested: bool = False
    """Whether the user decided it."""
    recompute_saves_bytes: int = 0
    """What recomputing it frees between its forward and its backward, at this batch size."""
    time_s: float = 0.0
    """What recomputing it adds to an optimizer step, further gathers included, with its operators as they are."""
    num_wrapped: int = 0
    """How many of its operators share its unit."""
    wrapping_saves_s: float = 0.0
    """What that saves in an optimizer step, beside units of their own: an equal share for each block."""
    wrapping_bytes: int = 0
    """What joining all such blocks adds to the peak."""


class OperatorPlan(FrozenModel):
    """What was decided for one operator."""

    name: str
    slices: tuple[Mode, ...] = Field(min_length=1)
    """The mode of each slice, in order; a single one if the operator is not split."""
    split_dim: int | None = None
    """Dimension of the weight that the slices divide; None if the operator is not split."""
    sharding_group: ShardingScope = ShardingScope.WORLD
    """The ranks that sharded slices are spread over."""
    hierarchical: bool = False
    """Whether world-wide collectives run in two stages, inside nodes and between them."""
    unit: str = ""
    """Name of the block whose sharded operators are gathered together, if it is one of them; empty if it is gathered by
    itself."""
    is_recomputed: bool = False
    """Whether it lies in a block that is recomputed (``ExecutionPlan.recomputed``)."""
    num_parameters: int = Field(ge=0)
    replicated_reason: str = ""
    """Why it must stay replicated; empty if it need not, or if the plan does not say."""
    unsplittable_reason: str = ""
    """Why it can't be split; empty if it can, or if the plan does not say."""
    alternatives: tuple[ChoiceCost, ...] = ()
    """What it might have been and what that costs, the choice itself among them; empty if the plan does not say."""

    @model_validator(mode="after")
    def _check_split_dim(self) -> OperatorPlan:
        if (len(self.slices) > 1) != (self.split_dim is not None):
            raise ValueError(
                f"{self.name}: {len(self.slices)} slices and split_dim={self.split_dim} contradict each other"
            )
        if self.unit and (self.split_dim is not None or Mode.DP in self.slices):
            raise ValueError(f"{self.name}: only what is sharded whole can share the unit of {self.unit}")
        return self

    @property
    def choice(self) -> ShardingChoice:
        """The same without names and costs."""
        return ShardingChoice(self.slices, self.split_dim, self.sharding_group, self.hierarchical)


class Prediction(FrozenModel):
    """What the plan is expected to cost, per optimizer step (accumulation included) and per rank."""

    step_time_s: float
    compute_time_s: float
    communication_time_s: float
    samples_per_s: float
    """Over all ranks."""
    peak_memory_bytes: int
    """What the device's own counter will show for a rank while it trains."""
    overhead_bytes: int
    """The part of the peak that was there before the model."""
    saving_memory_bytes: int = 0
    """What a rank holds between steps while it saves a checkpoint; 0 if none is, or nothing becomes whole for that."""
    evaluation_memory_bytes: int = 0
    """The same while it evaluates; 0 if that takes no more than a step's forward."""
    heap_headroom_bytes: int = 0
    """Of the peak, what stays free beside a heap in which freed tensors stay."""

    @property
    def non_training_bytes(self) -> dict[str, int]:
        """Bytes by what is done between steps, in words; without what is not done or takes no more than a step."""
        known = {"saving a checkpoint": self.saving_memory_bytes, "evaluation": self.evaluation_memory_bytes}
        return {what: size for what, size in known.items() if size}

    @property
    def max_memory_bytes(self) -> int:
        """In steps and between them: what must fit."""
        return max(self.peak_memory_bytes, self.saving_memory_bytes, self.evaluation_memory_bytes)


class BatchSizePoint(FrozenModel):
    """The best plan at one batch size."""

    batch_size: int
    samples_per_s: float
    peak_memory_bytes: int


class PeakMoment(FrozenModel):
    """The moment of a step at which most is held, and what makes it up, in bytes."""

    where: str
    """``forward of NAME``, ``backward of NAME``, ``optimizer step``."""
    states: int
    gradients: int
    gathered: int
    transient: int
    activations: int
    overhead: int
    heap: int = 0
    """What the heap takes beside, if freed tensors stay in it."""

    @property
    def heap_growth(self) -> float:
        """``heap`` as a share of what is freed within a step."""
        freed = self.gradients + self.gathered + self.transient + self.activations
        return self.heap / freed if freed else 0.0


class SearchStop(FrozenModel):
    """Why no larger batch size was tried."""

    reason: Literal["memory", "maximum", "fixed", "global_batch_size"]
    """Out of memory, at the largest one asked for, told what to use, or told what all ranks together make."""
    batch_size: int | None = None
    """``process_status_bytes``: the first that does not fit; ``maximum``: the largest allowed."""
    needed_bytes: int | None = None
    """``process_status_bytes``: the peak of the smallest plan at that batch size."""


class ExecutionPlan(FrozenModel):
    """The chosen batch size and the choice for each operator, with what they are predicted to cost."""

    format: Literal["lightning_osdp.plan"] = "lightning_osdp.plan"
    version: Literal[1] = 1
    model: ModelIdentity
    cluster: Cluster
    memory_limit_bytes: int = Field(gt=0)
    batch_size: int = Field(gt=0)
    accumulate_grad_batches: int = Field(gt=0, default=1)
    global_batch_size: int = Field(gt=0)
    operators: tuple[OperatorPlan, ...]
    recomputed: tuple[str, ...] = ()
    """Names of the modules (blocks) whose activations are not kept but computed again in the backward pass."""
    blocks: tuple[BlockPlan, ...] = ()
    """All repeated blocks of the model, recomputed or not; empty if the plan does not say."""
    update_in_backward: bool = False
    """Whether the optimizer updates sharded parameters in the backward pass, each as soon as its gradient is reduced,
    which is freed then; others (replicated as a whole or in a slice, sharded inside nodes) wait for the optimizer's
    step."""
    retain_freed_memory: bool = False
    """Whether freed tensors stay in the process's heap for the next ones, whose pages are there then (CPU, glibc). That
    takes more memory (``PeakMoment.heap``); without it, what is freed is handed back to the system."""
    predicted: Prediction
    frontier: tuple[BatchSizePoint, ...] = ()
    memory_shadow_price: float | None = None
    """Seconds a step that one more byte of memory would save at this batch size, by the search's linear relaxation."""
    peak: PeakMoment | None = None
    search_stop: SearchStop | None = None

    @model_validator(mode="after")
    def _check_units_agree(self) -> ExecutionPlan:
        choices: dict[str, ShardingChoice] = {}
        for operator in self.operators:
            if operator.unit and choices.setdefault(operator.unit, operator.choice) != operator.choice:
                raise ValueError(f"{operator.name} differs in mode or group from others in the unit of {operator.unit}")
        return self

    def without_alternatives(self) -> ExecutionPlan:
        """What was decided and how it came about, without what else each operator could be."""
        operators = tuple(operator.model_copy(update={"alternatives": ()}) for operator in self.operators)
        return self.model_copy(update={"operators": operators, "blocks": ()})

    def to_json(self) -> str:
        """The plan as indented JSON text."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> ExecutionPlan:
        """Reads what ``to_json`` wrote.

        Args:
            text: JSON text.
            source: where it came from, for the error.

        Raises:
            ConfigurationError: ``text`` is not JSON, or a field is missing or wrong.
            PlanMismatchError: it is a plan of another version.
        """
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{source} is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            raise ConfigurationError(f'{source} is not an execution plan: it has no "format": "{PLAN_FORMAT}"')
        if data.get("version") != PLAN_VERSION:
            raise PlanMismatchError(
                f"{source} has version {data.get('version')}, this release reads version {PLAN_VERSION}: make a new plan"
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(f"{source} is damaged: field {where}: {first['msg']}") from error

    def check(self, model: ModelProfile, ranks: int, nodes: int | None = None) -> None:
        """Refuses a plan that was made for something else.

        Args:
            model: that it is to be applied to.
            ranks: of this run.
            nodes: they are on; None if that is not known yet. It matters only to plans that use nodes.

        Raises:
            PlanMismatchError: says what differs: the model, its operators, or the ranks.
        """
        if self.cluster.ranks != ranks:
            raise PlanMismatchError(
                f"the plan is for {self.cluster.ranks} ranks, this run has {ranks}: make a new plan"
            )
        in_nodes = any(op.sharding_group == ShardingScope.NODE or op.hierarchical for op in self.operators)
        if nodes is not None and in_nodes and nodes != self.cluster.nodes:
            raise PlanMismatchError(
                f"the plan shards operators inside {self.cluster.nodes} nodes, this run has {nodes}: make a new plan"
            )
        if self.model.num_parameters != model.num_parameters:
            raise PlanMismatchError(
                f"the plan is for a model of {self.model.num_parameters:,} parameters, "
                f"this one has {model.num_parameters:,}: make a new plan"
            )
        planned, present = [op.name for op in self.operators], [op.name for op in model.operators]
        if planned != present:
            missing = sorted(set(planned) ^ set(present))
            what = f"operators that only one of them has: {', '.join(missing[:5])}" if missing else "order of operators"
            raise PlanMismatchError(f"the plan is for another model ({what}): make a new plan")
        if self.model.fingerprint != model.fingerprint:
            raise PlanMismatchError(
                "the plan is for another model: names and counts agree, but shapes, dtypes or trainability differ "
                f"(fingerprint {self.model.fingerprint[:12]}, here {model.fingerprint[:12]}): make a new plan"
            )
