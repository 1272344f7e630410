"""What is compared: OSDP and what a Lightning user would pick instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

OSDP = "osdp"
NO_TP = "osdp-no-tp"
"""OSDP without tensor parallelism. Not a competitor."""
OWN = (OSDP, NO_TP)
"""What finds its batch size itself."""
ALONE = "alone"
"""Each rank trains for itself, without any communication: what the compute alone takes. Not a competitor."""

BASES = {
    "fairscale-op": "FairScale FSDP, per operator",
    "fairscale-block": "FairScale FSDP, per block",
    "fsdp-full": "Lightning FSDP, FULL_SHARD",
    "fsdp-grad": "Lightning FSDP, SHARD_GRAD_OP",
    "shard": "Lightning fully_shard",
    "shard-keep": "Lightning fully_shard, parameters kept",
    "ddp": "Lightning DDP",
}
"""The competitors, in the order in which they are shown."""


@dataclass(frozen=True)
class System:
    """One way to train: a strategy, with or without activation checkpointing and the allocator setting."""

    base: str
    checkpointing: bool = False
    """Whether every block is recomputed in the backward pass."""
    allocator: bool = False
    """Whether the allocator is set as OSDP does it: glibc's to hand freed tensors back, CUDA's to let segments grow."""

    @property
    def name(self) -> str:
        """``ddp``, ``ddp+ckpt``, ``ddp+alloc``, ``ddp+ckpt+alloc``."""
        return self.base + "+ckpt" * self.checkpointing + "+alloc" * self.allocator

    @property
    def label(self) -> str:
        """For people."""
        names = BASES | {OSDP: "OSDP", NO_TP: "OSDP without tensor parallelism", ALONE: "compute alone"}
        return names[self.base] + ", recomputed" * self.checkpointing + ", allocator set" * self.allocator


def parse(name: str) -> System:
    """The system of a name.

    Raises:
        ValueError: there is none.
    """
    base, *options = name.split("+")
    if base not in (*BASES, *OWN, ALONE) or set(options) - {"ckpt", "alloc"}:
        raise ValueError(
            f"no system {name!r}: a name is one of {', '.join(BASES)}, then maybe +ckpt, then maybe +alloc"
        )
    return System(base, "ckpt" in options, "alloc" in options)


def every() -> tuple[System, ...]:
    """All competitors."""
    return tuple(System(base, ckpt, alloc) for base, ckpt, alloc in product(BASES, (False, True), (False, True)))


def strongest() -> tuple[System, ...]:
    """Those of the quick form: the paper's baseline and the fastest of Lightning's, both also with recomputing, which
    wins where links are slow or memory is short; and DDP, which wins where there is enough of both."""
    names = ("fairscale-op", "fairscale-op+ckpt", "fsdp-full", "fsdp-full+ckpt", "ddp")
    return tuple(replace(parse(name), allocator=True) for name in names)


def selected(words: str) -> tuple[System, ...]:
    """``ddp,shard+ckpt`` name systems; a bare base stands for all its variants, ``all`` and ``strongest`` for sets."""
    found: list[System] = []
    for word in words.split(","):
        if word in ("all", "strongest"):
            found += every() if word == "all" else strongest()
        elif word in BASES:
            found += [system for system in every() if system.base == word]
        else:
            found.append(parse(word))
    return tuple(dict.fromkeys(found))
