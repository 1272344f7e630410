"""Plans that cut whatever was found to be tensor parallel in a module."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
from tests.support.models import hand_made_plan

OTHER_MODES = (Mode.ZDP, Mode.DP, Mode.ZDP2)


def plan_of_candidates(
    module: LightningModule, batch: dict[str, Any], ranks: int, rest: str = "dp", recomputed: tuple[str, ...] = ()
) -> ExecutionPlan:
    """Cut every candidate over as many ranks as it may be; the rest has one mode, or ``mixed`` ones in turn."""
    degrees = tuple(degree for degree in range(2, ranks + 1) if ranks % degree == 0)
    size = len(next(iter(batch.values())))
    model = trace(TrainingStep(module, batch, size, torch.device("cpu"), tensor_degrees=degrees)).model_profile
    splits, scopes = {}, {}
    for candidate in model.tensor_candidates:
        splits |= {name: candidate.split(i, max(candidate.degrees)) for i, name in enumerate(candidate.operators)}
        if candidate.scope is not None:
            scopes[candidate.scope] = candidate.tensor_scope
    operators = []
    for index, operator in enumerate(model.operators):
        mode = OTHER_MODES[index % 3] if rest == "mixed" else Mode(rest)
        mode = mode if operator.is_shardable else Mode.DP
        slices = (Mode.TP if operator.name in splits else mode,)
        split, count = splits.get(operator.name), operator.num_parameters
        operators.append(OperatorPlan(name=operator.name, slices=slices, tensor=split, num_parameters=count))
    changes = {"operators": tuple(operators), "tensor_scopes": scopes, "recomputed": recomputed}
    return ExecutionPlan.model_validate(dict(hand_made_plan({}, ranks, fingerprint=model.fingerprint)) | changes)
