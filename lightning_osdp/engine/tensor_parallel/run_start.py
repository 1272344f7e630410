"""What the ranks of a group tell each other when a run starts, and rows that they gather in the meantime.

Note [expected runs]: if two runs of a unit were alike, ranks expect the next one to be so, too. They gather rows of
these sizes while their numbers are on the way, and a rank that has others, or only joins, gives zeros. If the numbers
are as expected the rows are there; otherwise nobody uses them, and they are gathered as they are. What is expected
follows from numbers that all ranks of a group have seen, so it is the same on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_osdp.backend.emulated import is_emulated
from lightning_osdp.backend.row_collectives import exchange_numbers, gather_rows, start_exchange
from lightning_osdp.engine.tensor_parallel.process_groups import TensorGroups

Answers = Sequence[Sequence[int]]
"""What each rank said: is present, signature, needs gradients, two counts."""

ABSENT = (0, 0, 0, 0, 0)
"""What a rank says if it only joins."""


@dataclass(frozen=True)
class _Rows:
    """What is known of a rank's rows besides their number."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def fit(self, rows: Tensor | None, count: int) -> Tensor:
        """Return the rows if they are such ones, and so many; else zeros."""
        shape = (count, *self.shape)
        is_alike = rows is not None and rows.shape == shape and rows.dtype == self.dtype
        return (
            rows.detach() if is_alike and rows is not None else torch.zeros(shape, dtype=self.dtype, device=self.device)
        )


class RunStarts:
    """The starts of a unit's runs in one phase.

    Args:
        groups: the ranks.
    """

    def __init__(self, groups: TensorGroups) -> None:
        self._groups = groups
        self._last: Answers = ()
        self._is_expected = False
        self._rows: _Rows | None = None

    def exchange(self, own: Sequence[int], rows: Tensor | None = None) -> tuple[Answers, Tensor | None]:
        """Return what all ranks say, and the rows of all if these were gathered already. Collective.

        Args:
            own: what this rank says.
            rows: its rows, if they may be gathered in the meantime; their number is the first count.
        """
        if self._is_expected and self._rows is not None:
            pending = start_exchange(own, self._groups.host)
            counts = [answer[3] for answer in self._last]
            fitting = self._rows.fit(rows, counts[self._groups.slices.rank()])
            with torch.no_grad():
                gathered = gather_rows(fitting, counts, self._groups.slices)
            answers = pending()
        else:
            gathered, answers = None, exchange_numbers(own, self._groups.host)
        seen = [(present, signature, *counts) for present, signature, _, *counts in answers]
        is_repeated = seen == [(present, signature, *counts) for present, signature, _, *counts in self._last]
        self._last = answers
        self._is_expected = is_repeated and self._can_expect(answers)
        if rows is not None:
            self._rows = _Rows(rows.shape[1:], rows.dtype, rows.device)
        return answers, gathered if is_repeated else None

    def _can_expect(self, answers: Answers) -> bool:
        """Return whether all ranks have run with rows that are alike but for their number, which is the first count."""
        first = answers[0]
        is_alike = all(answer[:2] == [1, first[1]] and answer[4] == first[4] for answer in answers)
        return bool(first[1]) and is_alike and not is_emulated(self._groups.slices)
