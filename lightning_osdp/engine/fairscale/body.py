"""What FairScale gets to see as the module of a unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class UnitBody(nn.Module):
    """The module inside a unit: it owns the operator's large parameters and calls the operator's forward."""

    def __init__(self, forward: Callable[..., Any], parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._operator_forward = forward
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"p{index}", parameter)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operator's own forward."""
        return self._operator_forward(*args, **kwargs)


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
