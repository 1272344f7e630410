"""Lightning's own strategies count the ranks that a Trainer started: the samples are to be divided over all ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_osdp.backend.emulated import is_emulated

_NAME = "distributed_sampler_kwargs"


def divide_samples_over_all_ranks() -> None:
    """Have samplers of all Trainers take rank 0's samples while the process group is emulated. Idempotent."""
    for owner in (DDPStrategy, FSDPStrategy):
        original: Any = vars(owner)[_NAME].fget
        if not getattr(original, "counts_emulated_ranks", False):
            setattr(owner, _NAME, property(_count_emulated_ranks(original)))


def _count_emulated_ranks(original: Any) -> Any:
    @functools.wraps(original)
    def kwargs(strategy: Any) -> dict[str, Any]:
        group: Any = dist.group.WORLD
        return {"num_replicas": group.size(), "rank": group.rank()} if is_emulated(group) else original(strategy)

    kwargs.counts_emulated_ranks = True  # type: ignore[attr-defined]
    return kwargs
