"""Plans that split and recompute, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_osdp.engine.splittable import split_dims
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.support.models import hand_made_plan

Split = tuple[tuple[Mode, ...], int | None]
"""Modes of the slices, and the dimension they are cut along (None for a single one)."""


def split_plan(splits: Mapping[str, Split], ranks: int, recomputed: Sequence[str] = ()) -> ExecutionPlan:
    operators = tuple(
        OperatorPlan(name=name, slices=modes, split_dim=dim, num_parameters=0) for name, (modes, dim) in splits.items()
    )
    return hand_made_plan({}, ranks).model_copy(update={"operators": operators, "recomputed": tuple(recomputed)})


def split_all(module: nn.Module, k: int, every: int = 1) -> dict[str, Split]:
    """Operators that can be split, into ``k`` slices (as many as there is room for), each in another mode than the one
    before, along one dimension and the other in turn. Tied weights stay out, and all but each ``every``-th operator."""
    tied = _tied(module)
    modes = list(WEIGHT_MODES)
    splits: dict[str, Split] = {}
    names = [n for n, m in module.named_modules() if split_dims(m)[0] and m.weight not in tied]
    for name in names[k % every :: every]:
        child = module.get_submodule(name)
        dims, _ = split_dims(child)
        dim = dims[len(splits) % len(dims)]
        slices = tuple(modes[(len(splits) + i) % 3] for i in range(min(k, child.weight.shape[dim])))
        splits[name] = (slices, dim if len(slices) > 1 else None)
    return splits


def _tied(module: nn.Module) -> set[nn.Parameter]:
    seen: set[nn.Parameter] = set()
    tied: set[nn.Parameter] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (tied if parameter in seen else seen).add(parameter)
    return tied
