"""What a rank holds of sharded parameters, which show the full tensor to everybody else."""

from __future__ import annotations

from torch import Tensor

from lightning_osdp.state.guarded_parameter import local_data


def local_shard(parameter: Tensor) -> Tensor:
    """The parameter's data as they are on this rank."""
    return local_data(parameter)
