"""Optimal sharded data parallelism for PyTorch Lightning: ``import lightning_osdp``, ``Trainer(strategy="osdp")``."""

from __future__ import annotations

import logging

from lightning.pytorch.strategies import StrategyRegistry

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
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.report import display
from lightning_osdp.report.diff import diff
from lightning_osdp.report.explain import explain
from lightning_osdp.strategy import checkpointing, pytorch_lightning_guard
from lightning_osdp.strategy.callback import OSDPCallback
from lightning_osdp.strategy.offline import plan
from lightning_osdp.strategy.osdp import OSDPStrategy

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
    "plan",
]

# As Lightning does: messages of a start are printed unless the program has set up logging itself.
_log = logging.getLogger(__name__)
if _log.level == logging.NOTSET:
    _log.setLevel(logging.INFO)
if not logging.root.hasHandlers():
    _log.addHandler(logging.StreamHandler())
    _log.propagate = False

if "osdp" not in StrategyRegistry:
    OSDPStrategy.register_strategies(StrategyRegistry)
pytorch_lightning_guard.register()
checkpointing.explain_folders_in_load_from_checkpoint()
display.register()
