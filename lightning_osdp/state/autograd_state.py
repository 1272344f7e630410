"""What autograd is doing now, which torch tells by a function of its own alone."""

from __future__ import annotations

import torch

NO_PASS = -1
"""What ``current_pass`` returns outside of a backward pass."""


def current_pass() -> int:
    """Return the number of the backward pass that is running; ``NO_PASS`` if none is."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether a backward pass is running, as where a block is recomputed."""
    return current_pass() != NO_PASS
