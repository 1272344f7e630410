"""What is legal for an operator: the modes of the paper, and which of them each operator may take."""

from __future__ import annotations

from enum import StrEnum

from lightning_osdp.planning.operators import Frozen, Operator


class Mode(StrEnum):
    """How the states of one slice are kept (the paper knows DP and ZDP; zdp2 is what its figure 1 draws as DP)."""

    DP = "dp"
    """Replicated: one all-reduce of the gradient."""
    ZDP2 = "zdp2"
    """States sharded, parameters kept whole from forward to backward (ZeRO-2, FSDP's SHARD_GRAD_OP)."""
    ZDP = "zdp"
    """States sharded, parameters gathered for the forward and again for the backward (ZeRO-3, FSDP's FULL_SHARD)."""


class Choice(Frozen):
    """One row of an operator's menu: a mode for each of its slices."""

    slices: tuple[Mode, ...]
    checkpoint: bool = False
    """Whether its activations are recomputed."""

    @property
    def mode(self) -> Mode:
        """The mode of an operator that is not split."""
        (mode,) = self.slices
        return mode


def legal_modes(operator: Operator) -> tuple[Mode, ...]:
    """Modes that ``operator`` may take, ``dp`` first.

    An operator that runs more than once in a step may not be freed in between, so it never takes ``zdp``.
    """
    if not operator.shardable:
        return (Mode.DP,)
    if operator.calls != 1:
        return (Mode.DP, Mode.ZDP2)
    return (Mode.DP, Mode.ZDP2, Mode.ZDP)
