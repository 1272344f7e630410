"""Plans made by hand for the test modules, so that nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_osdp.backend.recursion import allow_depth_of
from lightning_osdp.errors import TraceError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace, trace_by_running
from tests.support.models import hand_made_plan


def plan_for(
    module: Any, batch: Any, ranks: int, policy: str, batch_size: int, accumulation: int = 1, shift: int = 0
) -> ExecutionPlan:
    """All operators kept as ``policy`` says: a mode's name, or ``mixed`` for one after the other from ``shift``."""
    model = profile_of(module, batch)
    large = [op.name for op in model.operators if op.is_shardable]
    modes = {name: list(Mode)[(i + shift) % 3] if policy == "mixed" else Mode(policy) for i, name in enumerate(large)}
    operators = [
        OperatorPlan(name=op.name, slices=(modes.get(op.name, Mode.DP),), num_parameters=op.num_parameters)
        for op in model.operators
    ]
    return plan_with(operators, model, ranks, batch_size, accumulation)


def profile_of(module: Any, batch: Any) -> ModelProfile:
    """What a step at this batch size alone shows, which says as much of the operators as one at two."""
    step = TrainingStep(module, batch, len(batch[0]), torch.device("cpu"), sizes=(len(batch[0]),))
    allow_depth_of(module)
    try:
        return trace(step).model_profile
    except TraceError:
        return trace_by_running(step).model_profile


def plan_with(
    operators: Iterable[OperatorPlan], model: ModelProfile, ranks: int, batch_size: int, accumulation: int = 1
) -> ExecutionPlan:
    """A plan of these operators that is accepted for the module of that profile."""
    plan = hand_made_plan({}, ranks, batch_size=batch_size, accumulation=accumulation)
    identity = plan.model.model_copy(update={"fingerprint": model.fingerprint, "num_parameters": model.num_parameters})
    return plan.model_copy(update={"operators": tuple(operators), "model": identity})
