"""What a heap takes in which freed tensors stay, beside those that are live (CPU, glibc)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from lightning_osdp.planning.spec.model import LinearInBatch, ModelProfile

HEAP_GROWTH = 0.5
"""By how much larger than what a step frees the heap is planned to be: what is freed is seldom as large as what comes
next. While training it is given room by and by, and no more than there is (``keeping``). [measured, natural language
model of 19 M parameters, batches of 8: 0.1 for a tenth of the time saved, 0.2 for two thirds, 0.5 for all; batches of
4: 1.0 for all]"""


MAX_MMAP_THRESHOLD = 32 << 20
"""From this size on a tensor has a mapping of its own and never stays: glibc lets its threshold be no higher."""


@dataclass(frozen=True)
class HeapModel:
    """What is planned for it.

    Attributes:
        growth: share of what is freed within a step.
        headroom: bytes by batch size that stay free: a heap that had room for all tensors may have none for a large one
            in the next step, which then lies beside it. [measured, wide model of 21.7 M parameters: 17 steps of 952
            MiB, one of more than 987]
    """

    growth: float
    headroom: LinearInBatch

    @classmethod
    def for_model(cls, model: ModelProfile) -> HeapModel:
        """A half of what is freed, and room for the largest gradient and the largest activation."""
        gradients = (p.gradient_bytes for operator in model.operators for p in operator.parameters)
        live = [moment.live.per_sample for moment in model.moments]
        made = max((after - before for before, after in pairwise(live)), default=0.0)
        return cls(HEAP_GROWTH, LinearInBatch(fixed=max(gradients, default=0), per_sample=max(0.0, made)))


def max_retained_batch_size(model: ModelProfile) -> float:
    """The largest batch whose activations all find room in a heap; infinite if any does.

    What lies beside the heap for its size is there at the same time as what the heap keeps for others, so a larger
    batch takes more memory than ``HeapModel`` says, or finds less of it in the heap. [measured, GPT-2 of 21 M parameters,
    4 ranks of 1038 MiB on 2 cores, logits of 4 MiB a sample: batches of 14 take 5.7 s, 3.8 foreseen, and touch 1.4 GiB
    of new pages in each; of 6 1.84, 1.89 foreseen, and 0.1 GiB]
    """
    per_sample = HeapModel.for_model(model).headroom.per_sample
    return (MAX_MMAP_THRESHOLD - 1) // per_sample if per_sample else math.inf


NO_RETENTION = HeapModel(0.0, LinearInBatch())
"""Where freed tensors are handed back."""
