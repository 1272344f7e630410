"""What autograd sees of tensor parallelism: collectives on rows, and slices of weights.

Note [gradients]: each rank has a batch of its own, and its loss is the mean over it. A slice's gradient is the sum over
the samples of its group, so 1 / t of it is the group's mean, which is averaged over the groups later.

Note [order]: every collective is announced (``CollectiveOrder``), those of the backward pass by ``announce``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.backend.row_collectives import columns_to_rows, gather_rows, rows_to_columns, scatter_rows
from lightning_osdp.errors import ShardingError
from lightning_osdp.state.first_order import first_order
from lightning_osdp.state.guarded_parameter import opened, without_guards

Collective = Callable[[Tensor, Sequence[int], Any], Tensor]
"""One of ``row_collectives``: takes rows, the counts of all ranks, and the group."""


class Phase(IntEnum):
    """The parts of a run, each of which is announced before its collectives."""

    __str__ = int.__repr__  # as from Python 3.11 on

    START = 0
    """Ranks tell each other what they have; then inputs are gathered, or whole weights."""
    OUTPUT = 1
    """Partial outputs are summed and scattered."""
    OUTPUT_GRADIENT = 2
    INPUT_GRADIENT = 3
    START_WITHOUT_GRADIENTS = 4


@dataclass(frozen=True)
class RowExchange:
    """Collectives on the rows of the ranks of a group, with those of their gradients.

    Attributes:
        counts: rows of each rank.
        group: the ranks.
        announce: called before each collective of the backward pass.
        prefetch: called after each of them.
        needs_grad: bit i is set if any rank needs gradients of the rows that are gathered as number i.
        early: the rows of all ranks that are gathered as number 0, if they were gathered before; for one use.
    """

    counts: Sequence[int]
    group: Any
    announce: Callable[[Phase], None]
    prefetch: Callable[[], None]
    needs_grad: int
    early: list[Tensor] = field(default_factory=list)

    def gather(self, rows: Tensor, index: int = 0) -> Tensor:
        """Return the rows (n, ...) of all ranks, which are gathered as number ``index``."""
        if (
            self.needs_grad >> index & 1
            and torch.is_grad_enabled()
            and rows.is_floating_point()
            and not rows.requires_grad
        ):
            rows = rows.detach().requires_grad_()  # the sum of gradients needs all ranks
        early = self.early.pop() if index == 0 and self.early else None
        forward = gather_rows if early is None else lambda *_: early
        return self._exchange(rows, forward, scatter_rows, Phase.INPUT_GRADIENT)

    def scatter(self, rows: Tensor) -> Tensor:
        """Return the sum over the ranks of this rank's rows of (n of all ranks, ...)."""
        return self._exchange(rows, scatter_rows, gather_rows, Phase.OUTPUT_GRADIENT)

    def to_rows(self, columns: Tensor) -> Tensor:
        """Return this rank's rows whole, where each rank has its columns (n of all ranks, c) of all rows."""
        return self._exchange(columns, columns_to_rows, rows_to_columns, Phase.OUTPUT_GRADIENT)

    def _exchange(self, rows: Tensor, forward: Collective, backward: Collective, phase: Phase) -> Tensor:
        return _Exchanged.apply(rows, self, forward, backward, phase)  # type: ignore[no-untyped-call, no-any-return]


def _describe_second_order(ctx: Any) -> ShardingError:
    return ShardingError(
        "a gradient is differentiated again through operators that are tensor parallel, which it was not when the step "
        "was traced: train without tensor parallelism, OSDPCallback(tensor_parallel=False)"
    )


class _Exchanged(torch.autograd.Function):
    """Rows that a collective returns; another one returns their gradients, and is announced as a phase."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, over: RowExchange, forward: Collective, backward: Collective, phase: Phase
    ) -> Tensor:
        ctx.over, ctx.collective, ctx.phase = over, backward, phase
        # Not as a view, which autograd does not let its user change in place.
        return forward(rows, over.counts, over.group).data

    @staticmethod
    @first_order(_describe_second_order)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.over.announce(ctx.phase)
        gradient = ctx.collective(gradient, ctx.over.counts, ctx.over.group)
        ctx.over.prefetch()
        return gradient, None, None, None, None


def read_slice(parameter: nn.Parameter, ranks: int) -> Tensor:
    """Return this rank's slice of a parameter, whose gradient is divided by so many ranks; see Note [gradients]."""
    with without_guards(), opened([parameter]):
        return _Slice.apply(parameter, 1 / ranks)  # type: ignore[no-untyped-call, no-any-return]


def share_gradient(values: Tensor, ranks: int) -> Tensor:
    """Return values whose gradient is divided by a number of ranks; see Note [gradients]. Nobody else may have it."""
    return _Slice.apply(values, 1 / ranks)  # type: ignore[no-untyped-call, no-any-return]


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return parameter.detach()

    @staticmethod
    @first_order(_describe_second_order)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # Nobody else has it: it comes from the product with the slice, or from an exchange.
        return gradient if ctx.scale == 1 else gradient.mul_(ctx.scale), None


def read_whole(
    parameters: Sequence[nn.Parameter],
    gather: Callable[[], list[Tensor]],
    store: Callable[[Sequence[Tensor | None]], None],
) -> list[Tensor]:
    """Return parameters in full.

    Args:
        parameters: whether any of them needs a gradient decides about ``store``.
        gather: returns them in full.
        store: called with the full gradients, which this rank alone has; None for what has not run.
    """
    with without_guards(), opened(parameters):
        return list(_Whole.apply(gather, store, *parameters))  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gather: Callable[[], list[Tensor]], store: Any, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.store = store
        ctx.set_materialize_grads(False)  # an operator that has not run has none
        return tuple(gather())

    @staticmethod
    @first_order(_describe_second_order)
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.store(gradients)
        return (None,) * (2 + len(gradients))
