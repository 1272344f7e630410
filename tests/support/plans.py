"""Plans made by hand for the test modules, so that nothing is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.profiling.tracing.trace import TracedStep
from tests.support.models import hand_made_plan


def plan_for(
    module: Any, batch: Any, ranks: int, policy: str, batch_size: int, accumulation: int = 1, shift: int = 0
) -> ExecutionPlan:
    """All operators kept as ``policy`` says: a mode's name, or ``mixed`` for one after the other from ``shift``."""
    traced: TracedStep = pipeline.profile_model(TrialContext(module, batch, len(batch[0]), torch.device("cpu")))
    model = traced.model_profile
    large = [op.name for op in model.operators if op.is_shardable]
    modes = {name: list(Mode)[(i + shift) % 3] if policy == "mixed" else Mode(policy) for i, name in enumerate(large)}
    operators = [
        OperatorPlan(name=op.name, slices=(modes.get(op.name, Mode.DP),), num_parameters=op.num_parameters)
        for op in model.operators
    ]
    return plan_with(operators, model, ranks, batch_size, accumulation)


def plan_with(
    operators: Iterable[OperatorPlan], model: ModelProfile, ranks: int, batch_size: int, accumulation: int = 1
) -> ExecutionPlan:
    """A plan of these operators that is accepted for the module of that profile."""
    plan = hand_made_plan({}, ranks, batch_size=batch_size, accumulation=accumulation)
    identity = plan.model.model_copy(update={"fingerprint": model.fingerprint, "num_parameters": model.num_parameters})
    return plan.model_copy(update={"operators": tuple(operators), "model": identity})
