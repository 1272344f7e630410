"""Python's limit of nested calls, which deeply nested modules would exceed."""

from __future__ import annotations

import sys

from torch import nn

FRAMES_PER_LEVEL = 20
"""Python frames for each level of nested modules: calls, hooks, copies and the engine's units take 3 to 15."""


def allow_depth_of(module: nn.Module) -> None:
    """Raise Python's limit for a module that is nested deeper than 50 levels; plain PyTorch reaches it at 300."""
    depth = max((name.count(".") + 1 for name, _ in module.named_parameters()), default=0)
    needed = 1000 + FRAMES_PER_LEVEL * max(0, depth - 50)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), needed))
