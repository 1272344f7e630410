"""What a user asks of the search beyond its limits: how operators may be split and over which ranks they may
be sharded, and which blocks are recomputed.

Names match a pattern if the pattern is a dotted prefix of them (``model.blocks.3`` for all that is in that block), or
a glob that fits the whole of them (``*.mlp.*``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.cost.sharding_scopes import available_scopes
from lightning_osdp.planning.spec.capabilities import ALL_CAPABILITIES, EngineCapabilities
from lightning_osdp.planning.spec.choices import ShardingScope
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.model import ModelProfile

SHARDING_GROUPS = ("auto", "world", "node")
"""What ``sharding_group`` may be."""

MAX_SUGGESTIONS = 5
"""How many names an error suggests."""


@dataclass(frozen=True)
class SearchConstraints:
    """What is left to the search (``"auto"``), and what is not.

    Attributes:
        slice_granularity: in how many slices operators are cut that can be and that are sharded at all (one that is
            replicated gains nothing). By pattern of the operator's name: the first that matches counts, operators that
            none matches are left to the search. 1: whole.
        activation_checkpointing: whether blocks are recomputed: all that can be (True), none (False), or those of
            these names and no others.
        sharding_group: the ranks that operators are sharded over: all of them, in one stage or two (``"world"``), or
            those of each node (``"node"``).
        update_in_backward: whether sharded parameters may be updated in the backward pass, where that pays.
        capabilities: what the engine can carry out.

    Raises:
        ConfigurationError: a value is of another form.
    """

    slice_granularity: Literal["auto"] | int | Mapping[str, int] = "auto"
    activation_checkpointing: Literal["auto"] | bool | Sequence[str] = "auto"
    sharding_group: str = "auto"
    update_in_backward: bool = False
    capabilities: EngineCapabilities = ALL_CAPABILITIES

    def __post_init__(self) -> None:
        if self.sharding_group not in SHARDING_GROUPS:
            raise ConfigurationError(
                f"sharding_group has to be {_join_with_or(SHARDING_GROUPS)}, not {self.sharding_group!r}"
            )
        wanted = self.slice_granularity
        counts = wanted.values() if isinstance(wanted, Mapping) else [1 if wanted == "auto" else wanted]
        for count in counts:
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigurationError(
                    "slice_granularity has to be 'auto', a whole number from 1 on, or such numbers by pattern of "
                    f"operator names, not {wanted!r}"
                )
        recompute = self.activation_checkpointing
        if recompute == "auto" or isinstance(recompute, bool):
            return
        listed = isinstance(recompute, Sequence) and not isinstance(recompute, str)
        if not listed or not all(isinstance(pattern, str) for pattern in recompute):
            raise ConfigurationError(
                "activation_checkpointing has to be 'auto', True, False, or patterns of the names of blocks, not "
                f"{recompute!r}"
            )

    @classmethod
    def from_config(cls, slice_granularity: object, activation_checkpointing: object) -> SearchConstraints:
        """From what a configuration file holds.

        Raises:
            ConfigurationError: a value is of another form.
        """
        recompute = activation_checkpointing
        if isinstance(recompute, list | tuple):
            recompute = tuple(recompute)
        return cls(slice_granularity, recompute)  # type: ignore[arg-type]  # checked at once

    def allowed_slices(self, operator: str) -> tuple[int, ...] | None:
        """Numbers of slices that the operator of that name may have where it is sharded; None: left to the search."""
        if not self.capabilities.slices:
            return (1,)
        wanted = self.slice_granularity
        if isinstance(wanted, Mapping):
            found = (count for pattern, count in wanted.items() if matches(pattern, operator))
            count = next(found, None)
            return None if count is None else (count,)
        return None if wanted == "auto" else (wanted,)

    def allowed_scopes(self, cluster: Cluster) -> tuple[tuple[ShardingScope, bool], ...]:
        """What operators may be sharded over, and whether in two stages.

        Raises:
            ConfigurationError: nodes are wished for where they make no difference or what they cost is not known.
        """
        there = available_scopes(cluster, self.capabilities)
        wanted = tuple(pair for pair in there if self.sharding_group in ("auto", pair[0].value))
        if wanted:
            return wanted
        if cluster.devices_by_node:
            why = f"nodes have {', '.join(map(str, cluster.devices_by_node))} devices: it needs equally many on each"
        elif not cluster.is_hierarchical:
            why = (
                f"nodes and devices of each are {cluster.nodes} x {cluster.devices_per_node}: it needs several of both"
            )
        else:
            why = "the cluster's description has no levels: it was made before they were measured"
        raise ConfigurationError(f"sharding_group='node' can't be had: {why}")

    def forced_recompute(self, block: str) -> bool | None:
        """Whether the block of that name is recomputed; None: left to the search."""
        wanted = self.activation_checkpointing
        if isinstance(wanted, bool):
            return wanted
        if isinstance(wanted, str):  # "auto"
            return None
        return any(matches(pattern, block) for pattern in wanted)

    def check(self, model: ModelProfile) -> None:
        """Refuses patterns that say nothing about ``model``.

        Raises:
            ConfigurationError: a pattern matches no operator (or no block), or only blocks that can't be recomputed.
        """
        if isinstance(self.slice_granularity, Mapping):
            operators = [operator.name for operator in model.operators]
            _check_matches("slice_granularity", self.slice_granularity, operators, "operator")
        if isinstance(self.activation_checkpointing, bool | str):
            return
        names = [block.name for block in model.blocks]
        _check_matches("activation_checkpointing", self.activation_checkpointing, names, "block that repeats")
        for pattern in self.activation_checkpointing:
            pinned = [block for block in model.blocks if matches(pattern, block.name) and block.recompute_blocker]
            if pinned:
                raise ConfigurationError(
                    f"activation_checkpointing: {pinned[0].name} can't be recomputed: {pinned[0].recompute_blocker}"
                )


UNCONSTRAINED = SearchConstraints()
"""Everything is left to the search."""


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` is a dotted prefix of ``key`` or a glob that fits it."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _check_matches(argument: str, patterns: Iterable[str], names: Sequence[str], kind: str) -> None:
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        near = difflib.get_close_matches(pattern, names, MAX_SUGGESTIONS, cutoff=0.3) or names[:MAX_SUGGESTIONS]
        there = f"near names: {', '.join(near)}" if near else "this model has none"
        raise ConfigurationError(f"{argument}: {pattern!r} matches no {kind} ({there})")


def _join_with_or(words: Iterable[str]) -> str:
    return " or ".join(repr(word) for word in words)
