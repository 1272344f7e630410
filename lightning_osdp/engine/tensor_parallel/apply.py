"""Make units of the tensor parallel operators of a plan, and complete their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_osdp.backend.collectives import all_reduce_async
from lightning_osdp.backend.row_collectives import exchange_numbers
from lightning_osdp.backend.work import Work
from lightning_osdp.engine.tensor_parallel.operator import TensorOperator, cut_dim
from lightning_osdp.engine.tensor_parallel.pair import PairUnit
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups
from lightning_osdp.engine.tensor_parallel.scope import ScopeUnit
from lightning_osdp.engine.tensor_parallel.single import SingleUnit
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit, UnitContext
from lightning_osdp.planning.spec.plan import OperatorPlan
from lightning_osdp.planning.spec.tensor import TensorScope
from lightning_osdp.state.dim_slice_layout import DimSliceLayout
from lightning_osdp.state.guarded_parameter import opened


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


def finish_gradients(units: Sequence[TensorUnit], has_pass: bool, is_synced: bool) -> None:
    """Average the gradients of slices over the ranks that hold the same one, when a backward pass is over. Collective.

    Args:
        units: in the same order on all ranks.
        has_pass: whether there was a pass of any rank since the last call.
        is_synced: whether gradients are used, not accumulated on each rank.
    """
    has_pass |= any(unit.has_new_gradients for unit in units)
    units = [unit for unit in units if unit.has_run]
    with torch.no_grad(), opened([weight for unit in units for weight in unit.layouts]):
        for unit in units if has_pass else ():
            unit.reduce_whole_gradients()
            unit.is_unsynced = True
        unsynced: dict[TensorGroups, list[nn.Parameter]] = {}
        for unit in units if is_synced else ():
            if unit.is_unsynced:
                weights = [weight for weight in unit.layouts if weight.requires_grad]
                unsynced.setdefault(unit.groups, []).extend(weights)
                unit.is_unsynced = False
        works = [work for groups, weights in unsynced.items() for work in _start_average(weights, groups)]
        for work in works:
            work.wait()
    for unit in units:
        unit.has_new_gradients = False


def _start_average(weights: Sequence[nn.Parameter], groups: TensorGroups) -> list[Work]:
    """Start to average gradients; where no rank has one, there is none."""
    if groups.replicas.size() == 1 or not weights:
        return []
    works = []
    answers = exchange_numbers([int(weight.grad is not None) for weight in weights], groups.replica_hosts)
    for weight, is_there in zip(weights, zip(*answers, strict=True), strict=True):
        if any(is_there):
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()
            works.append(all_reduce_async(weight.grad.detach(), groups.replicas))
    return works
