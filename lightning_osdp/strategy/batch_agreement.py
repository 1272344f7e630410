"""The batches that all ranks plan with, where the ranks' loaders give other ones."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import replace
from typing import Any

from lightning_osdp.autotune.ranks import RankGroup
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import OSDPWarning, format_error
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
    largest_bytes, typical_bytes, num_samples = zip(*sizes, strict=True)
    largest_on = max(range(len(sizes)), key=largest_bytes.__getitem__)
    typical_on = sorted(range(len(sizes)), key=typical_bytes.__getitem__)[len(sizes) // 2]
    if num_samples[typical_on] != num_samples[largest_on]:
        typical_on = largest_on
    data.bytes_per_sample = largest_bytes[largest_on] / num_samples[largest_on]
    is_same = largest_bytes[largest_on] == typical_bytes[typical_on]
    sent = [_send(ranks, batches[0], largest_on)] + ([] if is_same else [_send(ranks, batches[1], typical_on)])
    errors = [error for _, error in sent if error]
    if errors:
        if ranks.is_rank_zero:
            warnings.warn(
                f"the ranks' batches differ in size, from {format_bytes(min(largest_bytes))} to "
                f"{format_bytes(max(largest_bytes))}, and can't be sent to the other ranks ({errors[0]}): each plans "
                "with its own. Give OSDPStrategy a sample_batch as large as any",
                OSDPWarning,
                stacklevel=2,
            )
        return context
    largest, typical = sent[0][0], sent[-1][0]
    batch_size = num_samples[largest_on]
    return replace(context, batch=typical, largest_batch=None if is_same else largest, batch_size=batch_size)


def _send(ranks: RankGroup, batch: Any, source: int) -> tuple[Any, str]:
    """Return the batch of rank ``source``, or why it can't be sent."""
    text, error = b"", ""
    if ranks.rank == source:
        try:
            text = pickle.dumps(batch)
        except Exception as cause:  # the user's class may raise anything
            error = format_error(cause)
    text, error = ranks.broadcast_object((text, error), source)
    if error:
        return None, error
    return ranks.raise_on_all_ranks(lambda: batch if ranks.rank == source else pickle.loads(text)), ""
