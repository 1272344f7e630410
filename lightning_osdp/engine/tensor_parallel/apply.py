"""Makes units of the tensor parallel operators of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_osdp.engine.tensor_parallel.operator import TensorOperator, cut_dim
from lightning_osdp.engine.tensor_parallel.pair import PairUnit
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.scope import ScopeUnit
from lightning_osdp.engine.tensor_parallel.single import SingleUnit
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit, UnitContext
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorScope
from lightning_osdp.state.dim_slice_layout import DimSliceLayout


def make_unit(
    name: str,
    root: nn.Module,
    plans: Sequence[OperatorPlan],
    needs: TensorScope | None,
    world: object,
    device: torch.device,
    context: UnitContext,
) -> TensorUnit:
    """Cut the weights of operators that run together, which are in full on the device. Collective.

    Args:
        name: the operator's name, or that of the scope.
        root: the module that is trained.
        plans: what was decided for the operators.
        needs: what the scope needs; None for an operator by itself.
        world: all ranks.
        device: where this rank computes.
        context: what all units share.
    """
    assert plans[0].tensor is not None
    groups = TensorGroups.create(world, plans[0].tensor.degree, device)
    operators = []
    for plan in plans:
        module, split = root.get_submodule(plan.name), plan.tensor
        assert split is not None
        assert isinstance(module.weight, nn.Parameter)
        layout = DimSliceLayout.create(module.weight.shape, cut_dim(module, split.role), groups.slices, split.parts)
        operators.append(TensorOperator(plan.name, module, split.role, layout))
    if needs is None:
        return SingleUnit(name, operators, groups, context)
    if not needs.needs_agreement:
        return PairUnit(name, operators, groups, context)
    owners = [attribute.rpartition(".") for attribute in needs.attributes]
    attributes = [(root.get_submodule(owner), attribute) for owner, _, attribute in owners]
    return ScopeUnit(name, operators, groups, context, root.get_submodule(name), attributes)
