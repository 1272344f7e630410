"""What a backend would refuse or wait for ever for: here it is an error at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_osdp.errors import ConfigurationError


def check_rank(name: str, rank: int, ranks: int) -> None:
    """Refuse a rank that the group does not have.

    Raises:
        ConfigurationError: there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ConfigurationError(f"{name}: there is no rank {rank} in a group of {ranks} ranks")


_BITWISE = ("BAND", "BOR", "BXOR")

_REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *_BITWISE)


def check_reduction(op: Any, tensors: Sequence[Tensor]) -> None:
    """Refuse a reduction that is not emulated, or that neither gloo on a CPU nor NCCL on CUDA does.

    Raises:
        ConfigurationError: there is none such, or not of such tensors.
    """
    name = next((name for name in _REDUCTIONS if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise ConfigurationError(
            f"the reduction {getattr(op, 'op', op)} is not emulated: sum, mean, product, min, max, and, or, xor are"
        )
    for tensor in tensors:
        has_fractions = tensor.is_floating_point() or tensor.is_complex()
        if name in _BITWISE and (has_fractions or tensor.is_cuda):
            kind = "on CUDA" if tensor.is_cuda else f"of {tensor.dtype}"
            raise ConfigurationError(f"there is no {name} of tensors {kind}")
        if name == "AVG" and tensor.dtype == torch.bool:  # Lightning asks for that of integers
            raise ConfigurationError("there is no mean of tensors of torch.bool: cast them, or sum them")


def check_parts(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Refuse tensors of which one is not as large as the parts of all ranks.

    Raises:
        ConfigurationError: sizes or data types do not fit together.
    """
    if whole.numel() != ranks * part.numel() or whole.dtype != part.dtype:
        raise ConfigurationError(
            f"{name} over {ranks} ranks: the tensor of all ranks has {whole.numel()} elements of {whole.dtype}, that "
            f"of one rank {part.numel()} of {part.dtype}"
        )


def check_contiguous(name: str, whole: Tensor) -> None:
    """Refuse to fill a tensor whose elements do not lie one after the other.

    Raises:
        ConfigurationError: they do not.
    """
    if not whole.is_contiguous():
        raise ConfigurationError(f"{name}: the tensor of all ranks is not contiguous")


def check_alike(name: str, given: Tensor, other: Tensor) -> None:
    """Refuse to copy a tensor into one of another size or data type.

    Raises:
        ConfigurationError: they differ.
    """
    if given.numel() != other.numel() or given.dtype != other.dtype:
        raise ConfigurationError(
            f"{name}: a tensor of its list has {given.numel()} elements of {given.dtype}, the tensor given with it "
            f"{other.numel()} of {other.dtype}"
        )


def check_list(name: str, tensors: Sequence[Any], part: Tensor | None, ranks: int) -> None:
    """Refuse a list that has not one tensor for each rank, each like ``part`` if that is given.

    Raises:
        ConfigurationError: there are more or fewer, or one has another size or data type.
    """
    if len(tensors) != ranks:
        raise ConfigurationError(f"{name} over {ranks} ranks: its list has {len(tensors)} tensors, not one for each")
    if part is not None:
        for tensor in tensors:
            check_alike(name, tensor, part)


def check_rows(name: str, tensors: tuple[Tensor, Tensor], sizes: Sequence[Sequence[int] | None], ranks: int) -> None:
    """Refuse an all-to-all whose rows can't be divided over the ranks, or can't be exchanged.

    Args:
        name: of the collective.
        tensors: the output and the input.
        sizes: rows of each rank in both; None: evenly divided.
        ranks: number of ranks.

    Raises:
        ConfigurationError: the given sizes are not those of its rows, the rows can't be divided evenly, or those of the
            output have another size or data type than those of the input.
    """
    output, given = tensors
    elements = [tensor.shape[1:].numel() for tensor in tensors]
    if elements[0] != elements[1] or output.dtype != given.dtype:
        raise ConfigurationError(
            f"{name}: rows of {elements[1]} elements of {given.dtype} can't fill rows of {elements[0]} of "
            f"{output.dtype}"
        )
    for tensor, parts in zip(reversed(tensors), reversed(sizes), strict=True):
        rows = len(tensor)
        fits = (len(parts) == ranks and sum(parts) == rows) if parts else rows % ranks == 0
        if not fits:
            words = f"in parts of {list(parts)}" if parts else "evenly"
            raise ConfigurationError(f"{name}: {rows} rows can't be divided over {ranks} ranks {words}")


def check_known(name: str, tensors: Sequence[Tensor], source: Any) -> None:
    """Refuse to make up integers, such as the length of a pickled object, that another rank would send.

    Raises:
        ConfigurationError: a tensor is neither of floating point nor complex.
    """
    if not all(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        raise ConfigurationError(
            f"a {name} from rank {source} is not emulated: that rank is not there, and what it would send is not known "
            "to this one"
        )
