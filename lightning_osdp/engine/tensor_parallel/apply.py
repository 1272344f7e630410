"""Makes units of the tensor parallel operators of a plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_osdp.engine.tensor_parallel.attention import AttentionUnit
from lightning_osdp.engine.tensor_parallel.check import shows_slices
from lightning_osdp.engine.tensor_parallel.operator import CutWeight, TensorOperator, cut_weights
from lightning_osdp.engine.tensor_parallel.pair import PairUnit
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.scope import ScopeUnit
from lightning_osdp.engine.tensor_parallel.single import SingleUnit
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit, UnitContext
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorRole, TensorScope
from lightning_osdp.state.dim_slice_layout import DimSliceLayout


def weights_to_cut(root: nn.Module, plan: OperatorPlan) -> list[CutWeight]:
    """Return the weights of a tensor parallel operator of the module that are cut."""
    assert plan.tensor is not None
    return cut_weights(root.get_submodule(plan.name), plan.tensor.role, plan.tensor.parts)


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
        assert plan.tensor is not None
        for cut in weights_to_cut(root, plan):
            layout = DimSliceLayout.create(cut.parameter.shape, cut.dim, groups.slices, cut.parts)
            operators.append(TensorOperator(plan.name, cut.module, plan.tensor.role, layout, cut.name, cut.bias_name))
    if plans[0].tensor.role == TensorRole.ATTENTION:
        return AttentionUnit(name, operators, groups, context)
    if needs is None:
        return SingleUnit(name, operators, groups, context)
    # What its user has replaced before was there when the plan was made.
    inner = [module for name in needs.inner_modules if not shows_slices(module := root.get_submodule(name))]
    owned = [name.rpartition(".") for name in (*(operator.name for operator in operators), *needs.inner_modules)]
    places = [(parent := root.get_submodule(owner), name, parent._modules[name]) for owner, _, name in owned]
    if not needs.needs_agreement:
        pair = PairUnit(name, operators, groups, context)
        pair.inner_modules, pair.places, pair.functions = inner, places, needs.functions
        return pair
    owners = [attribute.rpartition(".") for attribute in needs.attributes]
    attributes = [(root.get_submodule(owner), attribute) for owner, _, attribute in owners]
    scope = ScopeUnit(name, operators, groups, context, root.get_submodule(name), attributes)
    scope.inner_modules, scope.places, scope.functions = inner, places, needs.functions
    return scope
