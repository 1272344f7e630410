"""Which parameters a step only casts by autocast or looks rows up in: they may be gathered in autocast's type.

That is proven by the recorded step: every aten call that gets a parameter's memory is such a cast of the whole of it,
or looks rows up in it under autocast. What is read in another way anywhere, as by a norm, a bag of embeddings, or where
autocast is switched off, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS, ComputeDtype
from lightning_osdp.profiling.tracing.parameter_owners import NamedParameter, OwnerScope
from lightning_osdp.profiling.tracing.recorder import Recording

COMPUTE_DTYPES: dict[torch.dtype, ComputeDtype] = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def find_compute_dtypes(
    module: nn.Module,
    scopes: Iterable[OwnerScope],
    parameters: Sequence[NamedParameter],
    recordings: Collection[Recording],
) -> dict[int, ComputeDtype]:
    """Return autocast's type by index of parameter, for operators that read all large parameters so, in one type.

    Args:
        module: the module whose step was recorded.
        scopes: its operators.
        parameters: its parameters.
        recordings: of the step at each batch size.
    """
    modules, found = dict(module.named_modules(remove_duplicate=False)), {}
    for scope in scopes:
        tensors = {index: parameters[index].tensor for index in scope.parameters}
        large = [index for index, p in tensors.items() if p.dim() > 1 or p.numel() >= SMALL_PARAMETER_ELEMENTS]
        dtypes = {_cast_dtype(index, recordings) for index in large}
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        # Those hand their parameters on in ways that Python does not see.
        hidden = (nn.RNNBase, torch.jit.ScriptModule)
        if dtype is None or any(isinstance(inner, hidden) for inner in modules[scope.name].modules()):
            continue
        if all(tensors[index].dtype == torch.float32 for index in large):
            found.update(dict.fromkeys(large, COMPUTE_DTYPES[dtype]))
    return found


def _cast_dtype(parameter: int, recordings: Iterable[Recording]) -> torch.dtype | None:
    """Return the type of a parameter's casts and look-ups; None if it is read in another way, or not at all."""
    dtypes = {dtype for recording in recordings for dtype in recording.cast_dtypes.get(parameter, {None})}
    is_read_otherwise = any(
        parameter in recording.read_as_is or parameter in recording.changed_parameters for recording in recordings
    )
    return dtypes.pop() if len(dtypes) == 1 and not is_read_otherwise else None


def leave_out_casts(recordings: Iterable[Recording], dtypes: Mapping[int, Any]) -> None:
    """Leave the casts of these parameters out of the live bytes: whether they are there depends on the plan."""
    for recording in recordings:
        casts = {storage for storage, parameter in recording.weight_casts.items() if parameter in dtypes}
        recording.planned_storages.update(casts)
