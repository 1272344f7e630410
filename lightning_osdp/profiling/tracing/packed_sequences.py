"""Attention masks on fake tensors: whether a row holds several sequences, which transformers reads from positions.

Rows of single sequences need no mask, but on fake tensors transformers can't tell and makes one. With a mask, keys and
values of grouped queries are copied for each query, and all of these copies are kept for the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._pytree import tree_leaves

MODULE, FUNCTION = "transformers.masking_utils", "find_packed_sequence_indices"


@contextmanager
def single_sequences(batch: Any) -> Iterator[None]:
    """Have transformers take positions that all rows share for those of single sequences within the block.

    The module counts such positions itself. Positions that the batch gives, and those that differ from row to row, may
    be of several sequences.

    Args:
        batch: the batch of the step, with fake tensors.
    """
    masking = sys.modules.get(MODULE)  # without it, nothing asks
    find = getattr(masking, FUNCTION, None)
    if find is None:
        yield
        return
    given = {_storage(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}

    def find_packed_sequence_indices(position_ids: Tensor) -> Any:
        is_shared = position_ids.dim() == 2 and position_ids.stride(0) == 0
        return None if is_shared and _storage(position_ids) not in given else find(position_ids)

    with mock.patch.object(masking, FUNCTION, find_packed_sequence_indices):
        yield


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
