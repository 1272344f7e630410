"""The fast path of torch's attention in evaluation, which is off while a plan is carried out.

It reads the weights of modules that it does not call. What else it does is done without it: a ``TransformerEncoder``
that is given a mask of padded positions leaves these out, and returns zeros (or its norm of them) in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

_DEVICES = ("cpu", "cuda", "xpu")

_turned_off: set[AttentionFastpath] = set()
_forward = nn.TransformerEncoder.forward


class AttentionFastpath:
    """The fast path, turned off until ``restore``."""

    def __init__(self) -> None:
        self._was_on = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        if self._was_on:
            _turned_off.add(self)
        if nn.TransformerEncoder.forward is _forward:
            nn.TransformerEncoder.forward = _without_padding(_forward)  # type: ignore[method-assign]

    def restore(self) -> None:
        """Turn it on again if it was."""
        torch.backends.mha.set_fastpath_enabled(self._was_on)
        _turned_off.discard(self)


def _without_padding(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the forward of an encoder with what its fast path returns in padded positions, where it would take it."""

    @wraps(forward)
    def run(
        self: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        output = forward(self, src, mask, src_key_padding_mask, is_causal)
        if not _turned_off or mask is not None or src_key_padding_mask is None:
            return output
        if not _takes_fastpath(self, src, src_key_padding_mask):
            return output
        padding = output.new_zeros(1, 1, output.shape[2])
        padding = padding if self.norm is None else self.norm(padding)
        return torch.where(src_key_padding_mask.bool()[..., None], padding, output)

    return run


def _takes_fastpath(encoder: Any, src: Tensor, padded: Tensor) -> bool:
    """Return whether torch would take the fast path, as it decides itself."""
    layer = encoder.layers[0]
    is_possible = getattr(encoder, "use_nested_tensor", False) and not layer.training and src.dim() == 3
    if not is_possible or src.is_nested or src.device.type not in _DEVICES or isinstance(src, FakeTensor):
        return False
    if torch.is_autocast_enabled() or torch.overrides.has_torch_function((src,)):
        return False
    if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in layer.parameters())):
        return False
    is_left_aligned: Callable[[Tensor, Tensor], bool] = torch._nested_tensor_from_mask_left_aligned
    return not getattr(encoder, "mask_check", True) or is_left_aligned(src, padded.logical_not())
