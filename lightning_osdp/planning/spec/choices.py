"""What is legal for an operator: the modes of the paper, which of them it may take, and how it may be split.

The paper's appendix C: of k slices any number may be sharded. Of those menus only rows are kept that can be of use:
slices are alike, so it only matters how many have which mode; and what is all replicated gains nothing by being split.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.model import Operator


class Mode(StrEnum):
    """How the states of one slice are kept (the paper knows DP and ZDP; zdp2 is what its figure 1 draws as DP)."""

    DP = "dp"
    """Replicated: one all-reduce of the gradient."""
    ZDP2 = "zdp2"
    """States sharded, parameters kept whole from forward to backward (ZeRO-2, FSDP's SHARD_GRAD_OP)."""
    ZDP = "zdp"
    """States sharded, parameters gathered for the forward and again for the backward (ZeRO-3, FSDP's FULL_SHARD)."""


class ShardingScope(StrEnum):
    """The ranks that an operator is sharded over."""

    WORLD = "world"
    """All of them."""
    NODE = "node"
    """Those of one node; gradients are then averaged between nodes (known as hybrid sharding, or MiCS)."""


class ShardingChoice(NamedTuple):
    """One row of an operator's menu: everything that is decided for it."""

    slices: tuple[Mode, ...] = (Mode.DP,)
    """The mode of each slice, in order; a single one if the operator is not split."""
    split_dim: int | None = None
    """Dimension of the weight that the slices divide; None if the operator is not split."""
    scope: ShardingScope = ShardingScope.WORLD
    """Of the slices that are sharded."""
    hierarchical: bool = False
    """Whether world-wide collectives run in two stages, inside nodes and between them."""


DEFAULT_SLICE_COUNTS = (2, 4, 8, 16)
"""Numbers of slices that are considered where none is wished for."""

MIN_SLICE_ELEMENTS = 1 << 16
"""Smaller slices are not offered: their collectives are all latency. [256 KiB in fp32; on gloo, where a latency is
worth about 100 KiB of transfer, and NCCL, where it is worth more, halving such a slice doubles what it costs]"""

SHARDED_FRACTION_STEPS = 4
"""Of more than this many slices, the sharded ones are counted in this many steps: finer ones differ by next to nothing
and make menus long."""


def legal_modes(operator: Operator) -> tuple[Mode, ...]:
    """Modes that ``operator`` may take, ``dp`` first.

    An operator that runs more than once in a step may not be freed in between, so it never takes ``zdp``; nor do tied
    weights, which are used from one end of the model to the other.
    """
    if not operator.is_shardable:
        return (Mode.DP,)
    if operator.calls != 1 or operator.tied:
        return (Mode.DP, Mode.ZDP2)
    return (Mode.DP, Mode.ZDP2, Mode.ZDP)


def slice_sizes(size: int, num_slices: int) -> tuple[int, ...]:
    """Sizes of ``num_slices`` slices of a dimension, as equal as can be, the larger ones first (``torch.tensor_split``'s rule).

    Raises:
        ConfigurationError: there are not 1 to ``size`` slices.
    """
    if not 1 <= num_slices <= size:
        raise ConfigurationError(f"a dimension of size {size} can't be cut into {num_slices} slices")
    least, larger = divmod(size, num_slices)
    return (least + 1,) * larger + (least,) * (num_slices - larger)


def slice_counts(operator: Operator, allowed_slices: Iterable[int] | None = None) -> tuple[int, ...]:
    """Numbers of slices, above 1, that ``operator`` may be cut into.

    Args:
        operator: has to be splittable, and to run once in a step.
        allowed_slices: numbers to choose from, however small the slices are; None for ``DEFAULT_SLICE_COUNTS``.
    """
    weight = operator.weight
    if weight is None or not operator.split_dims or operator.calls != 1:
        return ()
    size = weight.shape[operator.split_dims[0]]
    if allowed_slices is not None:
        return tuple(k for k in allowed_slices if 1 < k <= size)
    return tuple(k for k in DEFAULT_SLICE_COUNTS if k <= size and weight.num_elements >= k * MIN_SLICE_ELEMENTS)


def enumerate_choices(
    operator: Operator,
    allowed_slices: Iterable[int] | None = None,
    measured_slices: Iterable[int] = DEFAULT_SLICE_COUNTS,
    scopes: Iterable[tuple[ShardingScope, bool]] = ((ShardingScope.WORLD, False),),
    engine_modes: Iterable[Mode] = tuple(Mode),
    mixed_slices: bool = True,
) -> list[ShardingChoice]:
    """What may be decided for ``operator``, replicated first.

    Args:
        operator: whose menu.
        allowed_slices: numbers of slices that it may have when it is sharded, 1 for whole; None for whatever pays.
        measured_slices: numbers of slices whose compute time is known; others are not offered.
        scopes: what it may be sharded over, and whether in two stages.
        engine_modes: modes that the engine can carry out.
        mixed_slices: whether slices of one operator may have different modes.
    """
    modes = [mode for mode in legal_modes(operator) if mode in set(engine_modes)]
    wanted = None if allowed_slices is None else tuple(allowed_slices)
    counts = [k for k in slice_counts(operator, wanted) if k in set(measured_slices)]
    rows = []
    if wanted is None or 1 in wanted or not counts:
        rows += [ShardingChoice((mode,)) for mode in modes[1:]]
    if Mode.ZDP in modes:
        mixtures = (slices for k in counts for slices in _mixed_modes(k) if mixed_slices or len(set(slices)) == 1)
        rows += [ShardingChoice(slices, operator.split_dims[0]) for slices in mixtures if set(slices) <= set(modes)]
    return [
        ShardingChoice(),
        *(row._replace(scope=group, hierarchical=staged) for group, staged in scopes for row in rows),
    ]


def _mixed_modes(num_slices: int) -> Iterator[tuple[Mode, ...]]:
    """Modes of k slices: any number sharded in one of two ways, the others sharded in the second or replicated."""
    for first, second in ((Mode.ZDP2, Mode.DP), (Mode.ZDP, Mode.DP), (Mode.ZDP, Mode.ZDP2)):
        for number in sorted(
            {max(1, num_slices * share // SHARDED_FRACTION_STEPS) for share in range(1, SHARDED_FRACTION_STEPS + 1)}
        ):
            if number < num_slices or second == Mode.DP:
                yield (first,) * number + (second,) * (num_slices - number)
