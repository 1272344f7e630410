"""An ordinary ``torch.save`` file whose tensors are computed one at a time while it is written.

``torch.save`` pickles an object first and then writes the storages of its tensors one after the other, each after
``storage.cpu()``. A streamed tensor has a storage without memory whose ``cpu`` computes the values.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_osdp.errors import CheckpointError


class _LazyStorage(torch.UntypedStorage):
    """A storage whose values are computed when they are written."""

    make: Callable[[], Tensor]

    def cpu(self) -> Any:
        """Return the values, which torch.save frees once they are in the file."""
        values = self.make().contiguous().cpu()
        return (values if values.storage_offset() == 0 else values.clone()).untyped_storage()


def save(value: Any, path: Path, value_factory: Callable[[Tensor], Callable[[], Tensor]] | None) -> None:
    """Write ``value`` as ``torch.save`` does, and meta tensors with the values that ``value_factory`` provides.

    Args:
        value: the object to save.
        path: a local file.
        value_factory: returns, for a meta tensor, the function that computes a tensor of its shape and dtype, which is
            called once; None: meta tensors are saved as such.

    Raises:
        OSError: the disk is full, or the file can't be written.
    """

    class Pickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if value_factory is not None and isinstance(obj, Tensor) and obj.is_meta:
                return _reduce_placeholder(obj, value_factory(obj))
            return NotImplemented

    module = ModuleType("streaming_pickle")
    module.Pickler = Pickler  # type: ignore[attr-defined]
    with path.open("wb") as file:  # a file of Python's own, so that a full disk is an OSError
        try:
            torch.save(value, file, pickle_module=module)
        except CheckpointError:
            raise
        except RuntimeError as error:  # from the end of a file whose middle could not be written: the cause comes first
            raise error.__context__ or error from None


def _reduce_placeholder(placeholder: Tensor, make: Callable[[], Tensor]) -> tuple[Any, ...]:
    """Pickle a placeholder like a dense CPU tensor with a storage of its own."""
    storage: Any = _LazyStorage(placeholder.numel() * placeholder.element_size(), device="meta")  # type: ignore[no-untyped-call]
    storage.make = make
    typed: Any = torch.TypedStorage(wrap_storage=storage, dtype=placeholder.dtype, _internal=True)  # type: ignore[no-untyped-call]
    typed._fake_device = "cpu"  # the device that torch.save writes down
    hooks: OrderedDict[Any, Any] = OrderedDict()
    return torch._utils._rebuild_tensor_v2, (typed, 0, tuple(placeholder.shape), placeholder.stride(), False, hooks)
