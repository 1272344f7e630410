"""Which plans can be applied to a module by units: what is refused, before any parameter has moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_osdp.engine.fairscale.communicators import sharded_operators, sharded_units
from lightning_osdp.engine.fairscale.sharded_operator import find_nested_operators, large_parameters
from lightning_osdp.engine.sliced_operator import check_slicing
from lightning_osdp.engine.splittable import MEMORY_ADVICE, SHARED_MEMORY, UNIT_DTYPES, is_in_shared_memory
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan


def check_operators(module: nn.Module, plan: ExecutionPlan) -> dict[str, list[nn.Parameter]]:
    """Refuse operators that can't be sharded, and return the parameters that each one's unit takes."""
    modules, nested_operators = dict(module.named_modules()), find_nested_operators(plan)
    parameters_by_operator: dict[str, list[nn.Parameter]] = {}
    owner: dict[nn.Parameter, str] = {}
    for operator in sharded_operators(plan):
        if operator.name not in modules or not operator.name:
            raise ShardingError(f"the plan shards {operator.name!r}, which is not a submodule of this module")
        if len(operator.slices) > 1:
            check_slicing(operator, modules[operator.name])
        parameters = large_parameters(module, operator.name, nested_operators)
        if not parameters:
            raise ShardingError(f"{operator.name} can't be sharded: all its parameters are small")
        for parameter in parameters:
            if parameter in owner:
                raise ShardingError(f"{operator.name} and {owner[parameter]} share a parameter: both can't shard it")
            owner[parameter] = operator.name
        parameters_by_operator[operator.name] = parameters
    return parameters_by_operator


def check_units(
    plan: ExecutionPlan, modules: Mapping[str, nn.Module], parameters_by_operator: Mapping[str, Sequence[nn.Parameter]]
) -> None:
    """Refuse units of several data types, and shared units that lie around no module that runs."""
    for unit, operators in sharded_units(plan).items():
        is_shared = bool(operators[0].unit)
        if is_shared and (unit not in modules or type(modules[unit]).forward is nn.Module.forward):
            raise ShardingError(f"the plan joins operators of {unit!r}, which is no submodule that is called")
        outside = [operator.name for operator in operators if not operator.name.startswith(unit + ".")]
        if is_shared and outside:
            raise ShardingError(f"the plan joins {outside[0]} with operators of {unit}, where it does not lie")
        dtypes = sorted({str(p.dtype) for operator in operators for p in parameters_by_operator[operator.name]})
        if len(dtypes) > 1:
            raise ShardingError(f"{unit} holds {' and '.join(dtypes)}: a unit's parameters are of one type")


def check_parameters(
    module: nn.Module, parameters_by_operator: Mapping[str, Sequence[nn.Parameter]], device: torch.device
) -> None:
    """Refuse parameters that units can't hold."""
    owner = {p: name for name, parameters in parameters_by_operator.items() for p in parameters}
    holders = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        operator = owner.get(parameter)
        if operator is None:
            continue
        if holders[name.rpartition(".")[0]] not in holders[operator].modules():  # one module may have two names
            raise ShardingError(f"{operator} can't be sharded: its parameter is also {name}, outside of it")
        if parameter.dtype not in UNIT_DTYPES:
            raise ShardingError(f"{name} is {parameter.dtype}: units hold float32, bfloat16 or float16")
        if device.type == "cpu" and is_in_shared_memory(parameter):
            raise ShardingError(f"{operator} can't be sharded: {name} {SHARED_MEMORY}: {MEMORY_ADVICE}")
