"""Plans that cut whatever was found to be tensor parallel in a module."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from lightning_osdp.profiling.tracing.trace import TrainingStep, trace
from tests.support.models import hand_made_plan

OTHER_MODES = (Mode.ZDP, Mode.DP, Mode.ZDP2)
OTHER_SLICES = ((Mode.ZDP,), (Mode.ZDP, Mode.ZDP), (Mode.ZDP2,), (Mode.DP,), (Mode.ZDP2, Mode.DP))


def plan_of_candidates(
    module: LightningModule,
    batch: dict[str, Any],
    ranks: int,
    rest: str = "dp",
    recomputed: tuple[str, ...] = (),
    max_degree: int = 0,
) -> ExecutionPlan:
    """Cut every candidate over as many ranks as it may be; the rest has one mode, or ``mixed`` ones in turn.

    With ``everything`` for the rest, two of five candidates are part of it, and what can be split is split in turn.
    """
    degrees = tuple(degree for degree in range(2, ranks + 1) if ranks % degree == 0)
    size = len(next(iter(batch.values())))
    model = trace(TrainingStep(module, batch, size, torch.device("cpu"), tensor_degrees=degrees)).model_profile
    splits, scopes = {}, {}
    for index, candidate in enumerate(model.tensor_candidates):
        if rest == "everything" and index % 5 < 2:
            continue
        degree = max(each for each in candidate.degrees if each <= (max_degree or ranks))
        splits |= {name: candidate.split(i, degree) for i, name in enumerate(candidate.operators)}
        if candidate.scope is not None:
            scopes[candidate.scope] = candidate.tensor_scope
    operators, turns = [], itertools.cycle(OTHER_SLICES)
    for index, operator in enumerate(model.operators):
        split, count, dim = splits.get(operator.name), operator.num_parameters, None
        if split is not None:
            slices: tuple[Mode, ...] = (Mode.TP,)
        elif not operator.is_shardable:
            slices = (Mode.DP,)
        elif rest == "everything":
            slices = next(turns)
            dim = operator.split_dims[0] if len(slices) > 1 and operator.split_dims else None
            slices = slices if dim is not None else slices[:1]
        else:
            slices = (OTHER_MODES[index % 3] if rest == "mixed" else Mode(rest),)
        names = {"name": operator.name, "slices": slices, "split_dim": dim}
        operators.append(OperatorPlan(tensor=split, num_parameters=count, **names))
    changes = {"operators": tuple(operators), "tensor_scopes": scopes, "recomputed": recomputed}
    return ExecutionPlan.model_validate(dict(hand_made_plan({}, ranks, fingerprint=model.fingerprint)) | changes)
