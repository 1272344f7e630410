"""Optimal sharded data parallelism for PyTorch Lightning: ``import lightning_osdp``, ``Trainer(strategy="osdp")``."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_osdp import namesake
from lightning_osdp.callbacks import OSDPCallback
from lightning_osdp.errors import (
    CheckpointError,
    ConfigurationError,
    InfeasibleError,
    OSDPError,
    OSDPWarning,
    OutOfMemoryError,
    PlanMismatchError,
    ShardingError,
    TraceError,
)
from lightning_osdp.planning.cluster import Cluster
from lightning_osdp.planning.compare import diff
from lightning_osdp.planning.explain import explain
from lightning_osdp.planning.plan import ExecutionPlan
from lightning_osdp.strategy import OSDPStrategy

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Cluster",
    "ConfigurationError",
    "ExecutionPlan",
    "InfeasibleError",
    "OSDPCallback",
    "OSDPError",
    "OSDPStrategy",
    "OSDPWarning",
    "OutOfMemoryError",
    "PlanMismatchError",
    "ShardingError",
    "TraceError",
    "diff",
    "explain",
]

if "osdp" not in StrategyRegistry:
    OSDPStrategy.register_strategies(StrategyRegistry)
namesake.register()
