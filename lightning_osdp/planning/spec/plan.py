"""ExecutionPlan: everything that the search hands to the engine, with JSON in and out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice, ShardingScope, devices_of_each_node
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.files import describe_error, parse_json
from lightning_osdp.planning.spec.frozen import Count, Finite, FrozenModel, NonNegative, Size
from lightning_osdp.planning.spec.model import MAY_NOT_RUN, NOT_USED, ComputeDtype, ModelProfile, Operator, ReduceDtype
from lightning_osdp.planning.spec.plan_v1 import raise_negative_times, upgrade_plan
from lightning_osdp.planning.spec.search_record import Baseline, BatchSizePoint, PeakMoment, SearchStop, TriedPlan
from lightning_osdp.planning.spec.tensor import TensorScope, TensorSplit, check_splits

PLAN_FORMAT = "lightning_osdp.plan"
PLAN_VERSION = 3


class ModelIdentity(FrozenModel):
    """The model that a plan is for."""

    fingerprint: str
    num_parameters: Size
    flops_per_sample: NonNegative = 0.0
    """Flops of forward and backward together, without recomputation; 0 if the plan does not say."""


class _Choice(FrozenModel):
    """The fields of a ``ShardingChoice`` in a plan."""

    slices: tuple[Mode, ...] = Field(min_length=1)
    split_dim: Size | None = None
    sharding_group: ShardingScope = ShardingScope.WORLD
    hierarchical: bool = False

    @property
    def choice(self) -> ShardingChoice:
        """The choice alone."""
        return ShardingChoice(self.slices, self.split_dim, self.sharding_group, self.hierarchical)


class ChoiceCost(_Choice):
    """Predicted cost of an operator under one choice, per rank and optimizer step."""

    tensor_degree: Count = 1
    """Ranks that hold one slice each, with mode ``tp``."""

    time_s: Finite
    resident_bytes: Size
    """Bytes held at the plan's peak or just before it, except while the operator itself runs."""
    transient_bytes: Size
    """Bytes held only while the operator runs; of all operators the largest counts."""

    @property
    def choice(self) -> ShardingChoice:
        """The choice alone."""
        return super().choice._replace(tensor_degree=self.tensor_degree)


class BlockPlan(FrozenModel):
    """The decision for one repeated block, and what recomputing it saves and costs."""

    name: str
    kind: str
    recomputed: bool
    recompute_blocker: str = ""
    """Why it can't be recomputed; empty if it can."""
    user_requested: bool = False
    recompute_saves_bytes: int = 0
    """Bytes that recomputing frees between its forward and its backward, at this batch size."""
    time_s: Finite = 0.0
    """Seconds that recomputing adds to an optimizer step, further gathers included."""
    num_wrapped: Size = 0
    """Operators of it that share a unit; 0 if each has its own."""
    wrapping_saves_s: Finite = 0.0
    """Seconds of an optimizer step that the shared unit saves: an equal share for each block."""
    wrapping_bytes: int = 0
    """Bytes that the shared units of all such blocks add to the peak."""


class OperatorPlan(_Choice):
    """The decision for one operator."""

    name: str
    unit: str = ""
    """Block whose unit it shares; empty if it has its own."""
    is_recomputed: bool = False
    """Whether it lies in a block that is recomputed (``ExecutionPlan.recomputed``)."""
    num_parameters: Size
    compute_dtype: ComputeDtype = ""
    """Autocast's type if its parameters are gathered in that (``Operator.compute_dtype``); empty for their own."""
    gathers_in_backward: bool = True
    """Whether its backward reads its parameters."""
    requested_mode: Mode | None = None
    """Mode that the user asked for; it differs from the operator's own where that can't be had."""
    replicated_reason: str = ""
    """Why it must stay replicated; empty if it need not, or if the plan does not say."""
    unsplittable_reason: str = ""
    """Why it can't be split; empty if it can, or if the plan does not say."""
    tensor: TensorSplit | None = None
    """How it is cut if its mode is ``tp``, else None."""
    tensor_refusal: str = ""
    """Why it can't be tensor parallel; empty if it can, or if the plan does not say."""
    tensor_group_refusal: str = ""
    """With which others it can't be tensor parallel, and why; empty if there are none, or if the plan does not say."""
    tensor_group: tuple[str, ...] = ()
    """All operators that can be tensor parallel only together with it; empty if there are none."""
    activation_bytes: Size = 0
    """Activations that a rank receives for it in a micro-batch if its mode is ``tp``."""
    weight_bytes: Size = 0
    """Its parameters, which would be exchanged instead; 0 if its mode is another one."""
    alternatives: tuple[ChoiceCost, ...] = ()
    """All its choices and their costs, the one taken among them; empty if the plan does not say."""

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
        """The choice alone."""
        return super().choice._replace(tensor_degree=self.tensor.degree if self.tensor is not None else 1)

    @model_validator(mode="after")
    def _check_tensor(self) -> OperatorPlan:
        if (Mode.TP in self.slices) != (self.tensor is not None):
            has = "none" if self.tensor is None else "one"
            raise ValueError(f"{self.name}: an operator has a tensor split if its mode is tp; this one has {has}")
        if self.tensor is not None and self.choice != ShardingChoice((Mode.TP,), tensor_degree=self.tensor.degree):
            raise ValueError(f"{self.name}: with mode tp, slices is one, and split_dim and sharding_group say nothing")
        if self.tensor is not None and self.unit:
            raise ValueError(f"{self.name}: with mode tp, it can't share the unit of {self.unit}")
        return self


class Prediction(FrozenModel):
    """Predicted cost of a plan, per optimizer step (accumulation included) and rank."""

    step_time_s: Finite
    compute_time_s: Finite
    communication_time_s: Finite
    samples_per_s: Finite
    peak_memory_bytes: Size
    """Peak in training, as the device's own counter will show it."""
    overhead_bytes: Size
    """Part of the peak that was there before the model."""
    saving_memory_bytes: Size = 0
    """Memory while a checkpoint is saved; 0 if none is, or if nothing is gathered for it."""
    evaluation_memory_bytes: Size = 0
    """Memory in evaluation; 0 if it never exceeds a step's forward."""
    heap_headroom_bytes: Size = 0
    """Part of the peak that stays free in a heap that retains freed tensors."""

    @property
    def non_training_bytes(self) -> dict[str, int]:
        """Memory by kind of work between steps, without kinds that never exceed a step."""
        named = {"saving a checkpoint": self.saving_memory_bytes, "evaluation": self.evaluation_memory_bytes}
        return {kind: size for kind, size in named.items() if size}

    @property
    def max_memory_bytes(self) -> int:
        """Largest memory in steps and between them; the limit applies to it."""
        return max(self.peak_memory_bytes, self.saving_memory_bytes, self.evaluation_memory_bytes)


class ExecutionPlan(FrozenModel):
    """The batch size and the choice for each operator, with their predicted cost."""

    format: Literal["lightning_osdp.plan"] = "lightning_osdp.plan"
    version: Literal[3] = 3
    model: ModelIdentity
    cluster: Cluster
    memory_limit_bytes: Count
    batch_size: Count
    accumulate_grad_batches: Count = 1
    global_batch_size: Count
    operators: tuple[OperatorPlan, ...]
    recomputed: tuple[str, ...] = ()
    """Names of the blocks whose activations are recomputed in the backward pass."""
    tensor_scopes: dict[str, TensorScope] = Field(default_factory=dict)
    """Modules whose operators run tensor parallel together, by name, and what they need for it."""
    blocks: tuple[BlockPlan, ...] = ()
    """All repeated blocks of the model, recomputed or not; empty if the plan does not say."""
    reduce_dtype: ReduceDtype = ""
    """Type in which gradients are reduced over the ranks; empty for their own."""
    update_in_backward: bool = False
    """Whether the optimizer updates sharded parameters in the backward pass, each as soon as its gradient is reduced,
    which is freed then. Parameters with a replicated slice or sharded inside nodes wait for the optimizer's step."""
    retain_freed_memory: bool = False
    """Whether freed tensors stay in the process's heap (CPU, glibc): reusing their pages is faster than new ones, but
    the heap is larger than the live tensors (``PeakMoment.heap``). Otherwise they go back to the system."""
    predicted: Prediction
    frontier: tuple[BatchSizePoint, ...] = ()
    memory_shadow_price: Finite | None = None
    """Seconds of a step that one more byte of memory would save, by the search's linear relaxation."""
    peak: PeakMoment | None = None
    search_stop: SearchStop | None = None
    tried: tuple[TriedPlan, ...] = ()
    """The plans that were tried in turns, this one among them; empty if none could be."""
    baselines: tuple[Baseline, ...] = ()
    """What else there was: DDP, ZeRO-2 and FSDP under the same limit; empty if the plan does not say."""

    text_display: ClassVar[Callable[[ExecutionPlan], str]] = repr
    """Makes ``str(plan)``; set by ``report.display``."""
    html_display: ClassVar[Callable[[ExecutionPlan], str | None]] = lambda plan: None
    """Makes what a notebook shows; set by ``report.display``."""

    page_display: ClassVar[Callable[[ExecutionPlan], str]] = repr
    """Makes ``to_html``; set by ``report.display``."""

    def __str__(self) -> str:
        return type(self).text_display(self)

    def _repr_html_(self) -> str | None:
        return type(self).html_display(self)

    @model_validator(mode="after")
    def _check_units_agree(self) -> ExecutionPlan:
        choices: dict[str, ShardingChoice] = {}
        for operator in self.operators:
            if operator.unit and choices.setdefault(operator.unit, operator.choice) != operator.choice:
                raise ValueError(f"{operator.name} differs in mode or group from others in the unit of {operator.unit}")
        return self

    @model_validator(mode="after")
    def _check_tensor_scopes(self) -> ExecutionPlan:
        splits = {operator.name: operator.tensor for operator in self.operators if operator.tensor is not None}
        check_splits(splits, self.tensor_scopes, devices_of_each_node(self.cluster))
        return self

    @classmethod
    def minimal(
        cls, operators: Iterable[OperatorPlan], cluster: Cluster, tensor_scopes: Mapping[str, TensorScope] | None = None
    ) -> ExecutionPlan:
        """Return a plan that holds decisions for operators, and no model, limit or prediction."""
        zeros: dict[str, Any] = {name: 0 for name, field in Prediction.model_fields.items() if field.is_required()}
        return cls(
            model=ModelIdentity(fingerprint="", num_parameters=0),
            cluster=cluster,
            memory_limit_bytes=1,
            batch_size=1,
            global_batch_size=cluster.ranks,
            operators=tuple(operators),
            tensor_scopes=dict(tensor_scopes or {}),
            predicted=Prediction(**zeros),
        )

    def without_alternatives(self) -> ExecutionPlan:
        """Return a copy without the blocks and the costs of each operator's other choices."""
        operators = tuple(operator.model_copy(update={"alternatives": ()}) for operator in self.operators)
        return self.model_copy(update={"operators": operators, "blocks": ()})

    def to_json(self) -> str:
        """Return the plan as indented JSON text."""
        return self.model_dump_json(indent=2)

    def to_html(self) -> str:
        """Return the plan as a page of HTML with its pictures, which loads nothing from elsewhere.

        Raises:
            ConfigurationError: matplotlib, which draws the pictures, is not installed.
        """
        return type(self).page_display(self)

    @staticmethod
    def is_plan(text: str) -> bool:
        """Return whether ``text`` is a plan of any release, valid or not."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return False
        return isinstance(data, dict) and data.get("format") == PLAN_FORMAT

    @classmethod
    def from_json(cls, text: str, source: str = "the plan") -> ExecutionPlan:
        """Read a plan that this or an earlier release has written.

        Args:
            text: JSON text.
            source: Name of the plan in errors.

        Raises:
            ConfigurationError: ``text`` is not JSON, or a field is missing or wrong.
            PlanMismatchError: The plan has a version that is not known.
        """
        try:
            data: Any = parse_json(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{source} is not JSON: {error}") from error
        except ValueError as error:
            raise ConfigurationError(f"{source} is damaged: {error}") from error
        if not isinstance(data, dict) or data.get("format") != PLAN_FORMAT:
            raise ConfigurationError(f'{source} is not an execution plan: it has no "format": "{PLAN_FORMAT}"')
        if data.get("version") in (1, 2) and not isinstance(data["version"], bool | float):
            data = {**(upgrade_plan(data) if data["version"] == 1 else data), "version": PLAN_VERSION}
        if data.get("version") != PLAN_VERSION:
            raise PlanMismatchError(
                f"{source} has version {data.get('version')}, this release reads versions up to {PLAN_VERSION}: "
                "make a new plan"
            )
        try:
            return cls.model_validate_json(json.dumps(data | {"cluster": raise_negative_times(data.get("cluster"))}))
        except ValidationError as error:
            raise ConfigurationError(f"{source} is damaged: {describe_error(error)}") from error

    def check(self, model: ModelProfile, ranks: int, nodes: int | None = None) -> None:
        """Refuse a plan that was made for another model or number of ranks, or that would give wrong results.

        Args:
            model: The model that the plan is to be applied to.
            ranks: Ranks of this run.
            nodes: Nodes of this run; None if not known yet. Only plans that shard inside nodes depend on it.

        Raises:
            PlanMismatchError: Says what differs: the model, its operators, the ranks, or what is possible with them.
        """

        def refuse(text: str) -> PlanMismatchError:
            return PlanMismatchError(f"the plan {text}: make a new plan")

        if self.cluster.ranks != ranks:
            raise refuse(f"is for {self.cluster.ranks} ranks, this run has {ranks}")
        uses_nodes = any(op.sharding_group == ShardingScope.NODE or op.hierarchical for op in self.operators)
        if nodes is not None and uses_nodes and nodes != self.cluster.nodes:
            raise refuse(f"shards operators inside {self.cluster.nodes} nodes, this run has {nodes}")
        degrees = {operator.tensor.degree for operator in self.operators if operator.tensor is not None}
        if nodes is not None and (wrong := [degree for degree in degrees if (ranks // nodes) % degree]):
            raise refuse(f"cuts operators over {max(wrong)} ranks, this run has {ranks // nodes} in a node")
        if self.model.num_parameters != model.num_parameters:
            counts = f"{self.model.num_parameters:,} parameters, this one has {model.num_parameters:,}"
            raise refuse(f"is for a model of {counts}")
        planned, present = ([(op.name, op.num_parameters) for op in each.operators] for each in (self, model))
        differing = {name for name, _ in planned} ^ {name for name, _ in present}
        if differing:
            raise refuse(f"is for another model (operators that only one of them has: {_list_first(differing)})")
        # The data may decide in which order operators run (experts), and the fingerprint depends on it.
        is_reordered = planned != present and sorted(planned) == sorted(present)
        if self.model.fingerprint != model.fingerprint and not is_reordered:
            sizes = {name for name, _ in {*planned} ^ {*present}}
            what = f"the sizes of {_list_first(sizes)}" if sizes else "shapes, dtypes or trainability"
            raise refuse(
                f"is for another model: names and counts agree, but {what} differ "
                f"(fingerprint {self.model.fingerprint[:12]}, here {model.fingerprint[:12]})"
            )
        if impossible := self._find_impossible(model):
            raise refuse(impossible)

    def _find_impossible(self, model: ModelProfile) -> str:
        """Return what this plan, which has the operators of ``model``, does that would be wrong there; else empty."""
        for operator, planned in zip(model.operators, self.operators_of(model), strict=True):
            if operator.replicated_reason.endswith((NOT_USED, MAY_NOT_RUN)):
                continue  # it depends on the data, and works
            if operator.replicated_reason and set(planned.slices) != {Mode.DP}:
                modes = " + ".join(dict.fromkeys(planned.slices))
                return f"has {operator.name} as {modes}, but it stays replicated: {operator.replicated_reason}"
            if operator.unsplittable_reason and planned.split_dim is not None:
                return f"splits {operator.name}, which can't be: {operator.unsplittable_reason}"
        blocker = next((b for b in model.blocks if b.recompute_blocker and b.name in self.recomputed), None)
        return f"recomputes {blocker.name}, which can't be: {blocker.recompute_blocker}" if blocker else ""

    @property
    def has_unproven_scopes(self) -> bool:
        """Return whether operators run tensor parallel together of which the plan does not say what they may do."""
        return any(scope.functions is None for scope in self.tensor_scopes.values())

    def with_proven_scopes(self, model: ModelProfile) -> ExecutionPlan:
        """Return this plan with what ``model`` says of operators that run tensor parallel together, where it says not.

        Raises:
            PlanMismatchError: They were not shown to give together what they give by themselves.
        """
        found, scopes = {candidate.scope: candidate for candidate in model.tensor_candidates}, dict(self.tensor_scopes)
        for name in [name for name, scope in scopes.items() if scope.functions is None]:
            own = {op.name: op.tensor for op in self.operators if op.tensor is not None and op.tensor.scope == name}
            degree, candidate = next(split.degree for split in own.values()), found.get(name)
            if candidate is None or degree not in candidate.degrees or own != candidate.splits(degree):
                reasons = {**model.tensor_refusals, **model.tensor_group_refusals}
                reason = next((reasons[op] for op in own if op in reasons), "no way to cut them was found")
                raise PlanMismatchError(f"the plan runs {', '.join(own)} tensor parallel together: {reason}")
            scopes[name] = candidate.tensor_scope
        return self.model_copy(update={"tensor_scopes": scopes})

    def with_types_of(self, model: ModelProfile) -> ExecutionPlan:
        """Return this plan with the types in which ``model``, which it is for, gathers and reduces."""
        types = {op.name: planned_types(op) for op in model.operators}
        operators = tuple(op.model_copy(update=types[op.name]) for op in self.operators)
        return self.model_copy(update={"operators": operators, "reduce_dtype": model.reduce_dtype})

    def operators_of(self, model: ModelProfile) -> list[OperatorPlan]:
        """Return the decisions in the order of the operators of ``model``, for which ``check`` has accepted the plan.

        Args:
            model: The model that the plan is applied to. The data may decide in which order it runs its operators.
        """
        by_name = {operator.name: operator for operator in self.operators}
        return [by_name[operator.name] for operator in model.operators]


def planned_types(operator: Operator) -> dict[str, Any]:
    """Return the fields of an ``OperatorPlan`` that follow from how the operator reads its parameters."""
    is_read = any(p.read_in_backward for p in operator.shardable_parameters)
    return {"compute_dtype": operator.compute_dtype, "gathers_in_backward": is_read or not operator.is_shardable}


def _list_first(names: Iterable[str]) -> str:
    return ", ".join(name or "the module itself" for name in sorted(names)[:5])
