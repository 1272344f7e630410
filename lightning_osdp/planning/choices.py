"""What is legal for an operator: the modes of the paper, and which of them each operator may take."""

from __future__ import annotations

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


def legal_modes(operator: Operator) -> tuple[Mode, ...]:
    """Modes that ``operator`` may take, ``dp`` first.

    An operator that runs more than once in a step may not be freed in between, so it never takes ``zdp``.
    """
    if not operator.shardable:
        return (Mode.DP,)
    if operator.calls != 1:
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
