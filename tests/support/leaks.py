"""What stays in memory after it is of no use."""

from __future__ import annotations

import gc

from torch import nn


def leaked_parameter_bytes(module: nn.Module) -> int:
    """Of parameters on the CPU, wherever they are held in this process, that are not in the memory of ``module``'s."""
    gc.collect()
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found = [each for each in gc.get_objects() if type(each) is nn.Parameter and each.device.type == "cpu"]
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(size for place, size in held.items() if place not in own)
