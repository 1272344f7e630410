"""Which batch sizes a search may try, and in what order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.search_record import SearchStop

MAX_BATCH_SIZE = 4096
"""Largest batch size tried unless the user gives another; memory usually ends the search earlier."""


@dataclass(frozen=True)
class BatchSizePolicy:
    """Which batch sizes may be tried.

    Attributes:
        batch_size: Fixed samples per device and micro-batch; None to search.
        max_batch_size: Upper end of the search.
        global_batch_size: If given, batch size x accumulation x ranks is exactly this number.
        accumulation: Micro-batches per optimizer step if ``global_batch_size`` does not decide it.
        bounding_setting: What ``max_batch_size`` follows from, such as an argument, for ``explain``; empty if unknown.
    """

    batch_size: int | None = None
    max_batch_size: int | None = None
    global_batch_size: int | None = None
    accumulation: int = 1
    bounding_setting: str = ""

    def candidates(self, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield the pairs (batch size, accumulation) to try, by rising batch size.

        Raises:
            ConfigurationError: ``global_batch_size`` is no multiple of ``ranks`` (times ``batch_size``).
        """
        largest = self.max_batch_size or MAX_BATCH_SIZE
        if self.global_batch_size is not None:
            yield from self._candidates_for_global(self.global_batch_size, ranks, largest)
        elif self.batch_size is not None:
            yield self.batch_size, self.accumulation
        else:
            size = 1
            while size < largest:
                yield size, self.accumulation
                size += max(1, size // 8)
            yield largest, self.accumulation

    def restricted_to(self, only: int) -> BatchSizePolicy:
        """Return the policy for a step that works at one batch size alone; 0 if it works at any.

        Raises:
            ConfigurationError: another batch size is asked for.
        """
        if only and self.batch_size not in (None, only):
            raise ConfigurationError(
                f"batch_size={self.batch_size} can't be: training_step works with {only} samples alone, as many as the "
                "data loader gives"
            )
        return replace(self, batch_size=only) if only else self

    def stop_reason(self) -> SearchStop:
        """Return why no batch size above the last of ``candidates`` is tried."""
        if self.batch_size is not None:
            return SearchStop(reason="fixed")
        if self.global_batch_size is not None and self.max_batch_size is None:
            return SearchStop(reason="global_batch_size")
        largest = self.max_batch_size or MAX_BATCH_SIZE
        return SearchStop(reason="maximum", batch_size=largest, setting=self.bounding_setting)

    def _candidates_for_global(self, total: int, ranks: int, max_batch_size: int) -> Iterator[tuple[int, int]]:
        if total % ranks:
            below = total // ranks * ranks
            raise ConfigurationError(
                f"global_batch_size={total} is not a multiple of the {ranks} ranks: the nearest "
                f"{f'are {below} and' if below else 'is'} {below + ranks}"
            )
        per_rank = total // ranks
        if self.batch_size is not None and per_rank % self.batch_size:
            raise ConfigurationError(
                f"global_batch_size={total} on {ranks} ranks is {per_rank} per rank, which is not a multiple of "
                f"batch_size={self.batch_size}"
            )
        sizes = [self.batch_size] if self.batch_size is not None else range(1, min(per_rank, max_batch_size) + 1)
        yield from ((size, per_rank // size) for size in sizes if per_rank % size == 0)
