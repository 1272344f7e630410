"""The batches that all ranks plan with, where the ranks' loaders give other ones."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import OSDPWarning
from lightning_osdp.planning.spec.formatting import format_bytes
from lightning_osdp.strategy.dataloader import TrainData, batch_bytes


def agree_on_batches(ranks: RankGroup, data: TrainData, context: TrialContext) -> TrialContext:
    """Return the step on the batches of all ranks: the largest one decides memory, the one of median size time.

    Collective. Batches are sent only where their sizes differ between the ranks.
    """
    batches = context.largest_batch if context.largest_batch is not None else context.batch, context.batch
    sizes = ranks.all_gather_object((*map(batch_bytes, batches), context.batch_size))
    if len(set(sizes)) == 1:
        return context
    numbers = range(len(sizes))
    largest_on = max(numbers, key=lambda rank: sizes[rank][0])
    typical_on = sorted(numbers, key=lambda rank: sizes[rank][1])[len(sizes) // 2]
    if sizes[typical_on][2] != sizes[largest_on][2]:  # of another number of samples
        typical_on = largest_on
    data.bytes_per_sample = sizes[largest_on][0] / sizes[largest_on][2]
    is_same = sizes[largest_on][0] == sizes[typical_on][1]
    sent = [_send(ranks, batches[0], largest_on)] + ([] if is_same else [_send(ranks, batches[1], typical_on)])
    errors = [error for _, error in sent if error]
    if errors:
        if ranks.is_rank_zero:
            warnings.warn(
                f"the ranks' batches differ in size, from {format_bytes(min(sizes)[0])} to "
                f"{format_bytes(max(sizes)[0])}, and can't be sent to the other ranks ({errors[0]}): each plans with "
                "its own. Give OSDPStrategy a sample_batch as large as any",
                OSDPWarning,
                stacklevel=2,
            )
        return context
    largest, typical = sent[0][0], sent[-1][0]
    return replace(context, batch=typical, largest_batch=None if is_same else largest, batch_size=sizes[largest_on][2])


def _send(ranks: RankGroup, batch: Any, source: int) -> tuple[Any, str]:
    """Return the batch of rank ``source``, or why it can't be sent."""
    text, error = b"", ""
    if ranks.rank == source:
        try:
            text = pickle.dumps(batch)
        except Exception as cause:  # the user's class may raise anything
            error = f"{type(cause).__name__}: {cause}"
    text, error = ranks.broadcast_object((text, error), source)
    if error:
        return None, error
    return ranks.raise_on_all_ranks(lambda: batch if ranks.rank == source else pickle.loads(text)), ""
