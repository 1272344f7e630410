"""Finds the operators: a parameter belongs to the innermost module that encloses every use of it in a traced step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_osdp.engine.splittable import SHARED_MEMORY, UNIT_DTYPES, is_in_shared_memory
from lightning_osdp.planning.spec.model import MAY_NOT_RUN, NOT_USED, SMALL_PARAMETER_ELEMENTS, WHOLE_MODEL
from lightning_osdp.profiling.tracing.recorder import Recording

Site = tuple[str, ...]


@dataclass(frozen=True)
class NamedParameter:
    """A parameter tensor with all its names."""

    tensor: Tensor
    names: tuple[str, ...]

    @property
    def owners(self) -> tuple[str, ...]:
        """The names of the modules that hold it, one for each name."""
        return tuple(name.rpartition(".")[0] for name in self.names)


@dataclass(frozen=True)
class OwnerScope:
    """The module and the parameters that make an operator."""

    name: str
    parameters: tuple[int, ...]
    """Indices of the parameters, ascending."""
    replicated_reason: str
    """Reason why the operator must be replicated, for the user; empty if it may be sharded."""
    encloses_operators: bool
    """Whether other operators run inside of it: then only ops that read its parameters are its own work."""
    tied_names: str = ""
    """Names of tied parameters that enclosed operators share, if it holds such and may be sharded; else empty."""


def named_parameters(module: nn.Module) -> tuple[NamedParameter, ...]:
    """Return the parameters in ``named_parameters`` order, tied ones once with all their names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return tuple(NamedParameter(tensors[key], tuple(own_names)) for key, own_names in names.items())


def find_scopes(
    module: nn.Module, parameters: Sequence[NamedParameter], recording: Recording, device: torch.device
) -> tuple[OwnerScope, ...]:
    """Return the operators in the order of their first use; unused ones come last."""
    modules = dict(module.named_modules(remove_duplicate=False))
    running = {name for op in recording.ops for name in op.site}
    subtrees = {name: {id(m) for m in modules[name].modules()} for name in running | {WHOLE_MODEL}}
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
    all_sites = {op.site for op in recording.ops}
    inner = {name: _inner_operators(name, modules, [*groups, *unused], all_sites) for name in order}
    scopes = []
    for name in order:
        own_unused = unused.pop(name, [])
        reason = _replication_reason(name, groups[name], parameters, inner[name], modules)
        reason = reason or _unsafe_reason(name, groups[name], recording) or _conditional_reason(groups[name], recording)
        if not reason and device.type == "cpu":  # elsewhere, they are copied to the device
            reason = _shared_memory_reason(parameters[index] for index in groups[name])
        reason = reason or _dtype_reason([parameters[index] for index in groups[name] + own_unused])
        if own_unused and not reason:
            reason = f"{parameters[own_unused[0]].names[0]} is not used in the traced step"
        encloses = bool(inner[name]) or not name
        tied = _format_ties(parameters[index] for index in groups[name]) if encloses and not reason else ""
        scopes.append(OwnerScope(name, tuple(sorted(groups[name] + own_unused)), reason, encloses, tied))
    scopes += [OwnerScope(name, tuple(own), NOT_USED, True) for name, own in unused.items()]
    return tuple(scopes)


def _parameter_uses(recording: Recording) -> tuple[dict[int, int], dict[int, set[Site]]]:
    """Return the index of the op that reads each parameter first, and the sites of all ops that do so in forward."""
    first_op: dict[int, int] = {}
    sites: dict[int, set[Site]] = defaultdict(set)
    for position, op in enumerate(recording.ops):
        if op.phase == "forward":
            for parameter in op.used_parameters:
                first_op.setdefault(parameter, position)
                sites[parameter].add(op.site)
    return first_op, sites


def _innermost_owner(sites: set[Site], owners: set[int], subtrees: Mapping[str, set[int]]) -> str:
    """Return the innermost module that was running at every site and holds every owner of the parameter."""
    candidates = reversed(next(iter(sites)))
    return next((n for n in candidates if owners <= subtrees[n] and all(n in site for site in sites)), WHOLE_MODEL)


def _inner_operators(name: str, modules: Mapping[str, nn.Module], operators: list[str], sites: set[Site]) -> list[str]:
    """Return other operators that lie in the module, or that ran while it did."""
    descendants = {id(m) for m in modules[name].modules()}
    called = {inner for site in sites if name in site for inner in site[site.index(name) + 1 :]}
    return [other for other in operators if other != name and (id(modules[other]) in descendants or other in called)]


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
    if inner and len(tied) < len(members):  # Tied parameters alone could be unsharded while the module runs.
        more = ", ..." if len(inner) > 3 else ""
        return f"its forward runs other operators: {', '.join(inner[:3])}{more}"
    path = name.split(".")
    for depth in range(len(path)):
        module = modules[".".join(path[: depth + 1])]
        if isinstance(module, torch.jit.ScriptModule):
            return "scripted by TorchScript"
        if is_compiled(module):
            return "compiled by torch.compile"
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has made what runs when a module is called."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _format_ties(parameters: Iterable[NamedParameter]) -> str:
    return ", ".join(" = ".join(parameter.names) for parameter in parameters)


def _unsafe_reason(name: str, members: Sequence[int], recording: Recording) -> str:
    """Say to the user why what the operator does to its parameters can't be done to parts of them; empty if it can."""
    if not recording.changed_parameters.isdisjoint(members):
        return "its weights are changed while it runs, by its forward or by a hook"
    if name in recording.transformed_modules:
        return "torch.func transforms it, where no weight can be gathered"
    return ""


def _dtype_reason(parameters: Sequence[NamedParameter]) -> str:
    """Say to the user which types of its parameters a unit can't hold, or not together; empty if it can."""
    known = [each for each in parameters if not is_lazy(each.tensor)]
    large = [each for each in known if each.tensor.dim() > 1 or each.tensor.numel() >= SMALL_PARAMETER_ELEMENTS]
    odd = next((each for each in large if each.tensor.dtype not in UNIT_DTYPES), None)
    if odd is not None:
        return f"{odd.names[0]} is {odd.tensor.dtype}, and what is sharded is float32, bfloat16 or float16"
    types = sorted({str(each.tensor.dtype) for each in large})
    return f"its parameters are of several types: {', '.join(types)}" if len(types) > 1 else ""


def _shared_memory_reason(parameters: Iterable[NamedParameter]) -> str:
    """Say to the user which parameter other processes may use; empty if there is none."""
    shared = next((each.names[0] for each in parameters if is_in_shared_memory(each.tensor)), "")
    return f"{shared} {SHARED_MEMORY}" if shared else ""


def _conditional_reason(members: Sequence[int], recording: Recording) -> str:
    """Say to the user why the operator may run on some ranks only, which sharding forbids; empty if it does not.

    Where a module has read values of tensors, what it runs afterwards may depend on them (an expert that no token
    chose, an early exit), and ranks see different data. Then some would gather while others don't.
    """
    for position, op in enumerate(recording.ops if recording.host_syncs else ()):
        if op.phase != "forward" or not set(op.used_parameters) & set(members):
            continue
        for before, site in recording.host_syncs:
            if before <= position and op.site[: len(site)] == site:
                where = site[-1] if site else "the training step"
                return f"{where} has looked at values before it runs, {MAY_NOT_RUN}"
    return ""
