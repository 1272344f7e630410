"""What an engine can carry out. The search offers nothing else."""

from __future__ import annotations

from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingScope
from lightning_osdp.planning.spec.frozen import FrozenModel

DEFAULT_ENGINE = "fairscale"
"""Name of the engine that is used if the user names none."""


class EngineCapabilities(FrozenModel):
    """What one engine can carry out on one type of device."""

    engine: str = DEFAULT_ENGINE
    """Name under which the engine is registered."""
    modes: tuple[Mode, ...] = WEIGHT_MODES
    """Modes of operators and slices; ``Mode.DP`` has to be among them. With ``Mode.TP`` operators may be tensor
    parallel."""
    slices: bool = True
    """Operators can be split into slices."""
    mixed_slices: bool = True
    """Slices of one operator can have different modes."""
    per_block_wrap: bool = True
    """The operators of a block can share one unit."""
    node_scope: bool = True
    """Operators can be sharded over the ranks of each node."""
    hierarchical: bool = True
    """Collectives of all ranks can run in two stages, inside nodes and between them."""
    in_backward: bool = True
    """Sharded parameters can be updated in the backward pass."""
    prefetch: bool = True
    """Units up to ``Cluster.prefetch_max_bytes`` can be gathered and reduced while others compute."""

    def can_shard_over(self, scope: ShardingScope, hierarchical: bool) -> bool:
        """Return whether operators can be sharded over a scope, in two stages if ``hierarchical``."""
        return self.node_scope if scope == ShardingScope.NODE else self.hierarchical or not hierarchical


ALL_CAPABILITIES = EngineCapabilities(modes=tuple(Mode))
"""Capabilities of an engine that can carry out every plan."""
