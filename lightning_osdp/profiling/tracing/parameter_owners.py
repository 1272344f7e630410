"""Finds the operators: a parameter belongs to the lowest module that encloses every use of it in a traced step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_osdp.planning.spec.model import WHOLE_MODEL
from lightning_osdp.profiling.tracing.recorder import Recording

Site = tuple[str, ...]


@dataclass(frozen=True)
class NamedParameter:
    """One parameter tensor with all its names."""

    tensor: Tensor
    names: tuple[str, ...]

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the modules that hold it, one for each name."""
        return tuple(name.rpartition(".")[0] for name in self.names)


@dataclass(frozen=True)
class OwnerScope:
    """The module and the parameters that make an operator."""

    name: str
    parameters: tuple[int, ...]
    replicated_reason: str
    encloses_operators: bool
    """Whether other operators run inside of it: then only what reads its parameters is its own work."""
    tied_names: str = ""
    """What those operators have in common, if it holds that and may be sharded, in words for the user; else empty."""


def named_parameters(module: nn.Module) -> tuple[NamedParameter, ...]:
    """Parameters in ``named_parameters`` order, tied ones once with all their names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(NamedParameter(tensors[key], tuple(found)) for key, found in names.items())


def find_scopes(
    module: nn.Module, parameters: Sequence[NamedParameter], recording: Recording
) -> tuple[OwnerScope, ...]:
    """Operators in the order of their first use; those that were not used come last."""
    modules = dict(module.named_modules(remove_duplicate=False))
    subtrees = {name: {id(m) for m in modules[name].modules()} for name in _running_modules(recording) | {WHOLE_MODEL}}
    first_use, sites = _parameter_uses(recording)
    groups: dict[str, list[int]] = defaultdict(list)
    unused: dict[str, list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if index in sites:
            owners = {id(modules[name]) for name in parameter.owners}
            groups[_innermost_owner(sites[index], owners, subtrees)].append(index)
        else:
            unused[parameter.owners[0]].append(index)
    order = sorted(groups, key=lambda name: min(first_use[index] for index in groups[name]))
    ran = {op.site for op in recording.ops}
    inner = {name: _inner_operators(name, modules, [*groups, *unused], ran) for name in order}
    scopes = []
    for name in order:
        idle = unused.pop(name, [])
        reason = _replication_reason(name, groups[name], parameters, inner[name], modules)
        reason = reason or _conditional_reason(name, groups[name], recording)
        if idle and not reason:
            reason = f"{parameters[idle[0]].names[0]} is not used in the traced step"
        encloses = bool(inner[name]) or not name
        tied = _format_ties(parameters[index] for index in groups[name]) if encloses and not reason else ""
        scopes.append(OwnerScope(name, tuple(sorted(groups[name] + idle)), reason, encloses, tied))
    scopes += [OwnerScope(name, tuple(found), "not used in the traced step", True) for name, found in unused.items()]
    return tuple(scopes)


def _running_modules(recording: Recording) -> set[str]:
    return {name for op in recording.ops for name in op.site}


def _parameter_uses(recording: Recording) -> tuple[dict[int, int], dict[int, set[Site]]]:
    """For each parameter, the index of the op that reads it first, and the sites of all that do so in forward."""
    first: dict[int, int] = {}
    sites: dict[int, set[Site]] = defaultdict(set)
    for position, op in enumerate(recording.ops):
        if op.phase == "forward":
            for parameter in op.used_parameters:
                first.setdefault(parameter, position)
                sites[parameter].add(op.site)
    return first, sites


def _innermost_owner(sites: set[Site], owners: set[int], subtrees: Mapping[str, set[int]]) -> str:
    """The innermost module that was running at every site and holds every owner of the parameter."""
    one, *others = sites
    for name in reversed(one):
        if owners <= subtrees[name] and all(name in site for site in others):
            return name
    return WHOLE_MODEL


def _inner_operators(name: str, modules: Mapping[str, nn.Module], operators: list[str], sites: set[Site]) -> list[str]:
    """Other operators that lie in the module, or that ``sites`` while it did."""
    below = {id(m) for m in modules[name].modules()}
    during = {inner for site in sites if name in site for inner in site[site.index(name) + 1 :]}
    return [other for other in operators if other != name and (id(modules[other]) in below or other in during)]


def _replication_reason(
    name: str,
    members: Sequence[int],
    parameters: Sequence[NamedParameter],
    inner: Sequence[str],
    modules: Mapping[str, nn.Module],
) -> str:
    tied = [parameters[index] for index in members if len(parameters[index].names) > 1]
    if name == WHOLE_MODEL and len(tied) == len(members):
        return f"tied across the model: {_format_ties(tied)}"
    if name == WHOLE_MODEL:
        return "used by the whole model"
    if inner and len(tied) < len(members):  # those that are tied are whole while the module runs, and only then
        more = ", ..." if len(inner) > 3 else ""
        return f"its forward runs other operators: {', '.join(inner[:3])}{more}"
    path = name.split(".")
    for depth in range(len(path)):
        module = modules[".".join(path[: depth + 1])]
        if isinstance(module, torch.jit.ScriptModule):
            return "scripted by TorchScript"
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            return "compiled by torch.compile"
    return ""


def _format_ties(parameters: Iterable[NamedParameter]) -> str:
    return ", ".join(" = ".join(parameter.names) for parameter in parameters)


def _conditional_reason(name: str, members: Sequence[int], recording: Recording) -> str:
    """Why the operator may run on one rank and not on another, which sharding forbids; empty if it can't be seen to.

    Where a module has read values of tensors, what it runs afterwards may depend on them (an expert that no token
    chose, an early exit), and ranks see different data. Then some would gather while others don't.
    """
    for position, op in enumerate(recording.ops if recording.host_syncs else ()):
        if op.phase != "forward" or not set(op.used_parameters) & set(members):
            continue
        for before, site in recording.host_syncs:
            if before <= position and op.site[: len(site)] == site:
                where = site[-1] if site else "the training step"
                return f"{where} has looked at values before it runs, so that it may not run on every rank"
    return ""
