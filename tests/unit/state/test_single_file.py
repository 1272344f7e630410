from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_osdp.state import single_file
from lightning_osdp.state.opened_file import OpenedFile


def test_single_file_save_is_torch_loadable_and_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    values = {name: torch.rand(3, n).to(kind) for n, (name, kind) in enumerate(KINDS.items(), 1)}
    handles = {name: torch.empty_like(value, device="meta") for name, value in values.items()}
    names = {id(handle): name for name, handle in handles.items()}
    alive: list[weakref.ref[Tensor]] = []

    def make(name: str) -> Tensor:
        assert not any(ref() is not None for ref in alive)
        padded = torch.cat([values[name].reshape(-1), torch.zeros(5, dtype=values[name].dtype)])
        alive.append(weakref.ref(padded))
        return padded[: values[name].numel()].view(values[name].shape)

    state: dict[str, Any] = {"handles": handles, "tied": handles["a"], "real": torch.ones(2), "rest": [1, "x", None]}
    single_file.save(state, tmp_path / "a.ckpt", lambda handle: lambda: make(names[id(handle)]))
    OpenedFile(tmp_path / "a.ckpt").verify()
    loaded = torch.load(tmp_path / "a.ckpt", weights_only=True)
    for name, value in values.items():
        assert torch.equal(loaded["handles"][name], value)
        assert loaded["handles"][name].dtype == value.dtype
    assert loaded["tied"].data_ptr() == loaded["handles"]["a"].data_ptr()
    assert loaded["rest"] == [1, "x", None]
    assert len(alive) == len(values)


KINDS = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64, "d": torch.uint8, "e": torch.float16}


def test_single_file_save_on_full_disk_raises_os_error() -> None:
    handle = torch.empty(1 << 20, device="meta")
    with pytest.raises(OSError, match="No space left"):
        single_file.save({"a": handle}, Path("/dev/full"), lambda _: lambda: torch.zeros(1 << 20))
