"""What autograd is doing now, which torch tells by a function of its own alone."""

from __future__ import annotations

from threading import get_ident

import torch

NO_PASS = -1
"""What ``current_pass`` returns outside of a backward pass."""


def current_pass() -> int:
    """Return the number of the backward pass that is running; ``NO_PASS`` if none is."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Return whether a backward pass is running, as where a block is recomputed."""
    return current_pass() != NO_PASS


def is_other_thread(own: int) -> bool:
    """Return whether this thread is neither the one with this number, nor autograd's."""
    return get_ident() != own and not is_in_backward()
