"""State dicts, checkpoints and norms are those of the plain module under any layout, and pass from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.state import state_dict as states
from lightning_osdp.state.checkpoint import CheckpointFormat
from lightning_osdp.state.dim_slice_layout import DimSliceLayout
from lightning_osdp.state.flat_layout import FlatPaddedLayout
from lightning_osdp.state.shard_layout import ShardLayout
from lightning_osdp.state.state_dict import ShardedParameters
from tests.support.ranks import run_ranks

DIMS = {"rows": (0, 1), "columns": (1, 1), "pieces": (1, 2)}
"""The dimension that is cut, and in how many parts."""


def layout_of(kind: str, shape: torch.Size) -> ShardLayout:
    if kind == "flat":
        return FlatPaddedLayout.create_sharded(shape, dist.group.WORLD)
    dim, parts = DIMS[kind]
    return DimSliceLayout.create(shape, dim, dist.group.WORLD, parts)


def make_plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Trained by one step, so that the optimizer has a state."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.rand(5, 8)).square().sum().backward()
    optimizer.step()
    return module, optimizer


def shard(module: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> ShardedParameters:
    """Shards all weights and their gradients and optimizer states; biases stay replicated."""
    layouts = {p: layout_of(kind, p.shape) for p in module.parameters() if p.dim() > 1}
    sharded = ShardedParameters(layouts, dist.group.WORLD)
    sharded.shard_existing_state(optimizer)
    for parameter, layout in layouts.items():
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        parameter.data = layout.shard(parameter.data)
        parameter.grad = layout.shard(gradient)
    return sharded


def collect(module: nn.Module, optimizer: torch.optim.Optimizer, sharded: ShardedParameters) -> Any:
    names = {parameter: name for name, parameter in module.named_parameters()}
    return (
        states.gather_state(sharded, lambda deferred: states.model_state(module, sharded, deferred)),
        states.gather_state(sharded, lambda deferred: states.optimizer_state(optimizer, sharded, names, 0, deferred)),
    )


def save_and_load(rank: int, ranks: int, folder: str, kind: str, other: str) -> Any:
    """Saves in both formats under one layout and loads under another, into a module with other values."""
    module, optimizer = make_plain(seed=1)
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    expected_norm = nn.utils.get_total_norm(gradients)
    sharded = shard(module, optimizer, kind)
    norm = sharded.compute_norm(
        [(p, p.grad) for p in module.parameters() if p.grad is not None], 2.0, torch.device("cpu")
    )
    assert torch.allclose(norm, expected_norm)
    with sharded.summon_full_params(module.parameters(), writeback=True), torch.no_grad():
        assert [tuple(p.shape) for p in module.parameters()] == [(4, 8), (4,), (2, 4), (2,)]
        next(module.parameters()).add_(1.0)
    names = {parameter: name for name, parameter in module.named_parameters()}
    loaded = []
    for save_format in ("full", "sharded"):
        checkpoints, path = CheckpointFormat(save_format), Path(folder, save_format, "last.ckpt")
        with checkpoints.deferred_gathers(rank == 0, False):
            state = {
                "state_dict": states.model_state(module, sharded, checkpoints.deferred_tensors),
                "optimizer_states": [
                    states.optimizer_state(optimizer, sharded, names, 0, checkpoints.deferred_tensors)
                ],
            }
            checkpoints.save(state, path, dist.group.WORLD)
        target, target_optimizer = make_plain(seed=2)
        target_sharded = shard(target, target_optimizer, other)
        target_names = {parameter: name for name, parameter in target.named_parameters()}
        checkpoint = checkpoints.load(path, True, dist.group.WORLD)
        states.load_model_state(target, target_sharded, checkpoint["state_dict"], True, checkpoints.fill)
        states.load_optimizer_state(
            target_optimizer, target_sharded, target_names, checkpoint["optimizer_states"][0], checkpoints.fill
        )
        loaded.append(collect(target, target_optimizer, target_sharded))
    return collect(module, optimizer, sharded), loaded


def expected_states() -> tuple[dict[str, Tensor], dict[str, Any]]:
    module, optimizer = make_plain(seed=1)
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    return module.state_dict(), optimizer.state_dict()["state"]


@pytest.mark.parametrize(("kind", "other"), [("flat", "columns"), ("rows", "pieces"), ("pieces", "flat")])
def test_states_pass_between_layouts_in_both_formats(kind: str, other: str, tmp_path: Path) -> None:
    model, optimizer = expected_states()
    (saved, loaded), _ = run_ranks(save_and_load, 2, str(tmp_path), kind, other)
    for model_state, optimizer_state in [saved, *loaded]:
        torch.testing.assert_close(model_state, dict(model), rtol=0, atol=0)
        torch.testing.assert_close(dict(optimizer_state["state"]), dict(optimizer), rtol=0, atol=0)
