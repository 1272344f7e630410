"""What is legal for an operator: the modes of the paper, which of them it may take, and how it may be split.

The paper's appendix C: of k slices any number may be sharded. Of those menus only rows are kept that can be of use:
slices are alike, so it only matters how many have which mode; and what is all replicated gains nothing by being split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.operators import Operator


class Mode(StrEnum):
    """How the states of one slice are kept (the paper knows DP and ZDP; zdp2 is what its figure 1 draws as DP)."""

    DP = "dp"
    """Replicated: one all-reduce of the gradient."""
    ZDP2 = "zdp2"
    """States sharded, parameters kept whole from forward to backward (ZeRO-2, FSDP's SHARD_GRAD_OP)."""
    ZDP = "zdp"
    """States sharded, parameters gathered for the forward and again for the backward (ZeRO-3, FSDP's FULL_SHARD)."""


class Group(StrEnum):
    """The ranks that an operator is sharded over."""

    WORLD = "world"
    """All of them."""
    NODE = "node"
    """Those of one node; gradients are then averaged between nodes (known as hybrid sharding, or MiCS)."""


class Choice(NamedTuple):
    """One row of an operator's menu: everything that is decided for it."""

    slices: tuple[Mode, ...] = (Mode.DP,)
    """The mode of each slice, in order; a single one if the operator is not split."""
    split_dim: int | None = None
    """Dimension of the weight that the slices divide; None if the operator is not split."""
    group: Group = Group.WORLD
    """Of the slices that are sharded."""
    two_stage: bool = False
    """Whether world-wide collectives run in two stages, inside nodes and between them."""


SLICES = (2, 4, 8, 16)
"""Numbers of slices that are considered where none is wished for."""

SMALLEST_SLICE_ELEMENTS = 1 << 16
"""Smaller slices are not offered: their collectives are all latency. [256 KiB in fp32; on gloo, where a latency is
worth about 100 KiB of transfer, and NCCL, where it is worth more, halving such a slice doubles what it costs]"""

SHARES = 4
"""Of more than this many slices, the sharded ones are counted in this many steps: finer ones differ by next to nothing
and make menus long."""


def legal_modes(operator: Operator) -> tuple[Mode, ...]:
    """Modes that ``operator`` may take, ``dp`` first.

    An operator that runs more than once in a step may not be freed in between, so it never takes ``zdp``; nor do tied
    weights, which are used from one end of the model to the other.
    """
    if not operator.shardable:
        return (Mode.DP,)
    if operator.calls != 1 or operator.tied:
        return (Mode.DP, Mode.ZDP2)
    return (Mode.DP, Mode.ZDP2, Mode.ZDP)


def slice_sizes(size: int, k: int) -> tuple[int, ...]:
    """Sizes of ``k`` slices of a dimension, as equal as can be, the larger ones first (``torch.tensor_split``'s rule).

    Raises:
        ConfigurationError: there are not 1 to ``size`` slices.
    """
    if not 1 <= k <= size:
        raise ConfigurationError(f"a dimension of size {size} can't be cut into {k} slices")
    least, larger = divmod(size, k)
    return (least + 1,) * larger + (least,) * (k - larger)


def granularities(operator: Operator, wished: Iterable[int] | None = None) -> tuple[int, ...]:
    """Numbers of slices, above 1, that ``operator`` may be cut into.

    Args:
        operator: has to be splittable, and to run once in a step.
        wished: numbers to choose from, however small the slices are; None for ``SLICES``.
    """
    weight = operator.weight
    if weight is None or not operator.split_dims or operator.calls != 1:
        return ()
    size = weight.shape[operator.split_dims[0]]
    if wished is not None:
        return tuple(k for k in wished if 1 < k <= size)
    return tuple(k for k in SLICES if k <= size and weight.num_elements >= k * SMALLEST_SLICE_ELEMENTS)


def menu(
    operator: Operator,
    wished: Iterable[int] | None = None,
    measured: Iterable[int] = SLICES,
    groups: Iterable[tuple[Group, bool]] = ((Group.WORLD, False),),
) -> list[Choice]:
    """What may be decided for ``operator``, replicated first.

    Args:
        operator: whose menu.
        wished: numbers of slices that it may have when it is sharded, 1 for whole; None for whatever pays.
        measured: numbers of slices whose compute time is known; others are not offered.
        groups: what it may be sharded over, and whether in two stages.
    """
    modes = legal_modes(operator)
    wanted = None if wished is None else tuple(wished)
    counts = [k for k in granularities(operator, wanted) if k in set(measured)]
    rows = []
    if wanted is None or 1 in wanted or not counts:
        rows += [Choice((mode,)) for mode in modes[1:]]
    if Mode.ZDP in modes:
        rows += [Choice(slices, operator.split_dims[0]) for k in counts for slices in _mixtures(k)]
    return [Choice(), *(row._replace(group=group, two_stage=staged) for group, staged in groups for row in rows)]


def _mixtures(k: int) -> Iterator[tuple[Mode, ...]]:
    """Modes of k slices: any number sharded in one of two ways, the others sharded in the second or replicated."""
    for first, second in ((Mode.ZDP2, Mode.DP), (Mode.ZDP, Mode.DP), (Mode.ZDP, Mode.ZDP2)):
        for number in sorted({max(1, k * share // SHARES) for share in range(1, SHARES + 1)}):
            if number < k or second == Mode.DP:
                yield (first,) * number + (second,) * (k - number)
