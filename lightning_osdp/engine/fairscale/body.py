"""Where a unit finds its parameters, and how FairScale sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def find_places(
    modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]
) -> list[tuple[Mapping[str, nn.Parameter | None], str, nn.Parameter]]:
    """Return where parameters are registered in modules: the registry, the name in it, and the parameter."""
    wanted = set(parameters)
    return [
        (module._parameters, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
        if parameter in wanted
    ]


@contextmanager
def reinterpret_as_float16(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Show bfloat16 parameters as float16, bit by bit, within a context: FairScale knows no other 16-bit type.

    FairScale only shards them there and computes nothing; what it gathers later has the unit's ``compute_dtype``.
    """
    bfloat16 = [parameter for parameter in parameters if parameter.dtype == torch.bfloat16]
    for parameter in bfloat16:
        parameter.data = parameter.data.view(torch.float16)
    yield
    for parameter in bfloat16:
        parameter.data = parameter.data.view(torch.bfloat16)
