"""What stays in memory after it is of no use."""

from __future__ import annotations

import gc

from torch import nn

from lightning_osdp.state.guarded_parameter import local_data, without_guards


def leaked_parameter_bytes(module: nn.Module) -> int:
    """Of parameters on the CPU, wherever they are held in this process, that are not in the memory of ``module``'s."""
    gc.collect()
    with without_guards():
        own = {local_data(parameter).untyped_storage().data_ptr() for parameter in module.parameters()}
        found = [each for each in gc.get_objects() if issubclass(type(each), nn.Parameter)]
        memories = [local_data(each).untyped_storage() for each in found if each.device.type == "cpu"]
        held = {memory.data_ptr(): memory.nbytes() for memory in memories}
    return sum(size for place, size in held.items() if place not in own)
