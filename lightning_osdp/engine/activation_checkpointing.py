"""Blocks whose activations are not stored: their forward runs again when the backward pass reaches them.

torch's non-reentrant checkpoint does it: one graph, so each parameter receives its gradient once; keyword arguments,
nested outputs, inputs without gradient, autocast and the random state are as in the first run. So are what torch does
not keep: the random numbers of Python and NumPy, and caches of keys and values, which the first run fills. What
FairScale's units need for it is in ``fairscale/unit.py`` (Note [a forward inside the backward]), so models that bring
their own checkpointing of this kind work as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.engine.key_value_cache import copy_caches
from lightning_osdp.engine.replaced_method import replace_method
from lightning_osdp.errors import ShardingError


def checkpoint_block(block: nn.Module) -> Callable[[], None]:
    """Have ``block`` store only its inputs when it runs with gradients. Return a function that undoes it."""
    own_forward, forward = vars(block).get("forward"), block.forward

    def checkpointed_forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        first, (args, kwargs) = [(args, kwargs)], copy_caches(args, kwargs)

        def run_forward(*packed: Any) -> Any:
            own, named = first.pop() if first else copy_caches(packed[:-1], packed[-1])
            return forward(*own, **named)

        # Keyword arguments become a positional one: there checkpoint looks for the device whose random state it keeps.
        outputs = checkpoint(run_forward, *args, kwargs, use_reentrant=False, context_fn=_keep_random_numbers)
        torch.clear_autocast_cache()  # which would hold casts of the block's weights until the whole forward ends
        return outputs

    def undo() -> None:
        if own_forward is None:
            del block.forward
        else:
            block.forward = own_forward

    replace_method(block, "forward", checkpointed_forward)
    return undo


class _SameRandomNumbers:
    """A context, entered as often as a block runs again, that has Python and NumPy draw what the first run drew."""

    def __init__(self) -> None:
        self._first = self._now = (random.getstate(), np.random.get_state())

    def __enter__(self) -> None:
        self._now = (random.getstate(), np.random.get_state())
        self._set(self._first)

    def __exit__(self, *_: object) -> None:
        self._set(self._now)

    @staticmethod
    def _set(states: tuple[Any, Any]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _keep_random_numbers() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first run of a block and of those after it."""
    return nullcontext(), _SameRandomNumbers()


def check_recomputed_blocks(names: Sequence[str], module: nn.Module) -> None:
    """Refuse blocks that can't be recomputed.

    Raises:
        ShardingError: one is not a submodule, or lies in another one.
    """
    modules = dict(module.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ShardingError(f"the plan recomputes {name!r}, which is not a submodule of this module")
        if type(modules[name]).forward is nn.Module.forward:
            raise ShardingError(f"the plan recomputes {name}, a {type(modules[name]).__name__}, which is never called")
        outer = next((other for other in names if name.startswith(other + ".")), None)
        if outer is not None or names.count(name) > 1:
            raise ShardingError(f"the plan recomputes {name} twice: by itself and with {outer or name}")
