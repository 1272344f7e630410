"""On a GPU: ranks that share it over gloo train as plain PyTorch does, and a run's memory is what was predicted.

pytest -m gpu        # one GPU is enough
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp import OSDPStrategy
from lightning_osdp.backend import collectives
from lightning_osdp.backend.allocator import enable_expandable_segments
from lightning_osdp.backend.memory import CAPPED_USABLE_FRACTION, memory_limit
from lightning_osdp.emulation.links import EmulatedLinks
from lightning_osdp.emulation.process_group import join
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.cluster import Cluster
from lightning_osdp.profiling.tracing.trace import MAX_TRACE_BATCH_SIZE
from tests.parity.test_low_precision import with_casts
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, some_cluster, wrap_blocks
from tests.support.modules import GPTModule, trainer
from tests.support.parity import reference, train
from tests.support.ports import free_port
from tests.support.ranks import run_ranks
from tests.support.traced_models import Regression, trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

RANKS, STEPS = 2, 6
MIB = 1 << 20
GPU = torch.device("cuda", 0)
BLOCKS = ("blocks.0", "blocks.1")
POLICIES = ("dp", "zdp2", "zdp", "mixed", "joined zdp")


def run_collectives(rank: int, ranks: int) -> dict[str, Any]:
    """Every collective of the engine on tensors of one device, and what a reduce-scatter takes."""
    torch.cuda.set_device(GPU)
    group, numel = dist.group.WORLD, 4 * MIB
    assert group is not None
    part = torch.full((numel // ranks,), float(rank), device=GPU)
    whole = torch.empty(numel, device=GPU)
    collectives.all_gather(whole, part, group)
    together = [torch.empty(2 * ranks, device=GPU) for _ in range(3)]
    collectives.all_gather_coalesced(together, [torch.full((2,), rank + 10.0 * i, device=GPU) for i in range(3)], group)
    mean = torch.full((5,), float(rank), device=GPU)
    collectives.all_reduce_mean(mean, group)
    addend = torch.arange(numel, device=GPU, dtype=torch.float32)
    scattered = torch.empty(numel // ranks, device=GPU)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    collectives.reduce_scatter(scattered, addend, group)
    torch.cuda.synchronize()
    copied = torch.cuda.max_memory_allocated() - before
    wrong = (scattered - ranks * addend.chunk(ranks)[rank]).abs().max()
    return {
        "gathered": [float(each.mean()) for each in whole.chunk(ranks)],
        "together": [each.tolist() for each in together],
        "mean": mean.tolist(),
        "wrong": float(wrong),
        "copied": copied / addend.nbytes,
    }


def test_collectives_with_ranks_sharing_a_gpu_give_expected_values() -> None:
    for found in run_ranks(run_collectives, RANKS):
        assert found["gathered"] == [0.0, 1.0]
        assert found["together"] == [[i * 10.0, i * 10.0, i * 10 + 1.0, i * 10 + 1.0] for i in range(3)]
        assert found["mean"] == [0.5] * 5
        assert found["wrong"] == 0.0
        assert found["copied"] <= collectives.reduce_scatter_copy_factor("gloo", RANKS, "cuda")


def can_allocate_in_fragmented_memory(rank: int, ranks: int, expand: bool) -> bool:
    """Whether what lies free between tensors, 3 times 40 MiB of 400 that may be taken, can be used for 120 MiB."""
    torch.cuda.set_device(GPU)
    torch.cuda.set_per_process_memory_fraction(400 * MIB / torch.cuda.get_device_properties(GPU).total_memory, GPU)
    if expand:
        enable_expandable_segments(GPU)

    def tensors(number: int, mib: int) -> list[Tensor]:
        return [torch.empty(mib * MIB, dtype=torch.uint8, device=GPU) for _ in range(number)]

    del tensors(3, 100)[:]
    staying = tensors(3, 60)
    try:
        return len(tensors(1, 120) + staying) == 4
    except torch.OutOfMemoryError:
        return False


@pytest.mark.parametrize("expand", [False, True])
def test_expandable_segments_use_fragmented_memory_within_cap(expand: bool) -> None:
    assert run_ranks(can_allocate_in_fragmented_memory, 1, expand) == [expand]


def train_all(rank: int, ranks: int) -> Any:
    torch.cuda.set_device(GPU)
    return [train(rank, ranks, *case, STEPS, str(GPU)) for case in product(POLICIES, (1, 2))]


def test_training_with_ranks_sharing_a_gpu_matches_plain_pytorch() -> None:
    expected_losses, expected = reference(STEPS)
    for results in zip(*run_ranks(train_all, RANKS), strict=True):
        losses = torch.tensor([losses for losses, *_ in results]).mean(0)
        torch.testing.assert_close(losses, torch.tensor(expected_losses), rtol=1e-4, atol=0)
        for name, weight in expected.items():
            torch.testing.assert_close(results[0][1][name].cpu(), weight, rtol=1e-3, atol=1e-5)


def train_without_host_waits(rank: int, ranks: int) -> list[float]:
    """As the first of eight ranks that are not there: in the last step torch raises where the host would wait."""
    dist.destroy_process_group()
    torch.cuda.set_device(GPU)
    join(EmulatedLinks(some_cluster(8, device="cuda: emulated", backend="emulated")))
    norms = []
    for policy in POLICIES:
        model = TinyGPT().to(GPU)
        plan = wrap_blocks(
            hand_made_plan(modes_for(model, policy.split()[-1]), 8), BLOCKS if "joined" in policy else ()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        engine = FairScaleEngine(GPU, broadcast=False)
        engine.apply(model, with_casts(plan, model), [optimizer])
        batches = gpt_batches(4, 4).to(GPU)
        for index, batch in enumerate(batches):
            torch.cuda.set_sync_debug_mode("error" if index == 3 else "default")
            engine.before_forward()
            with torch.autocast("cuda", torch.bfloat16):
                loss = gpt_loss(model, batch)
            loss.backward()
            engine.before_optimizer_step(optimizer)
            norm = engine.clip_grad_norm(model.parameters(), 0.5)
            optimizer.step()
            engine.after_optimizer_step()
            optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        norms.append(float(norm))
        engine.close()
    return norms


def test_step_has_the_host_wait_for_nothing() -> None:
    (norms,) = run_ranks(train_without_host_waits, 1)
    assert len(norms) == len(POLICIES)
    assert all(torch.tensor(norms).isfinite())


def test_trace_on_cuda_attributes_moments_to_same_operators_as_on_cpu() -> None:
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())))
    found = {kind: trace(Regression(net), torch.ones(4, 8), 4, device=torch.device(kind)) for kind in ("cpu", "cuda:0")}
    cpu, cuda = ([(moment.operator, moment.phase) for moment in each.model_profile.moments] for each in found.values())
    assert cuda == cpu
    assert found["cpu"].batch_sizes == (2, 8)
    assert found["cuda:0"].batch_sizes == (2, MAX_TRACE_BATCH_SIZE)


class Wide(GPTModule):
    """Large enough for its tensors to be all that counts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.wide = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8)))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        rows = batch[0].float().mean(1, keepdim=True).expand(-1, 2048) / 2048
        return gpt_loss(self.model, batch[0]) + self.wide(rows.repeat(64, 1)).square().mean()


def fit(folder: str, **osdp: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Wide()
    devices = {"accelerator": "gpu", "devices": 1, "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1"))}
    made = trainer(folder, OSDPStrategy(cache=f"{folder}/cache", **osdp), **devices)
    peaks: list[int] = []
    ends = made.strategy.optimizer_step

    def noted(*args: Any, **kwargs: Any) -> Any:
        found = ends(*args, **kwargs)
        peaks.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        return found

    made.strategy.optimizer_step = noted  # type: ignore[method-assign]
    made.fit(module)
    plan = made.strategy.execution_plan
    return {"plan": plan, "peaks": peaks, "device": str(next(module.parameters()).device)}


def set_one_rank_per_node(rank: int, ranks: int, port: int) -> None:
    """Each rank alone on a machine, as far as Lightning knows: all have the first device."""
    dist.destroy_process_group()
    values = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in {**values, "MASTER_PORT": port}.items()})


def fit_on_one_gpu(rank: int, ranks: int, folder: str, port: int) -> dict[str, Any]:
    set_one_rank_per_node(rank, ranks, port)
    return fit(folder)


def fit_on_shared_gpu(rank: int, ranks: int, folder: str, port: int) -> dict[str, Any]:
    """Each may take a part of the device."""
    set_one_rank_per_node(rank, ranks, port)
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.set_per_process_memory_fraction(600 * MIB / total, GPU)
    assert abs(memory_limit(GPU, 1) - CAPPED_USABLE_FRACTION * 600 * MIB) < MIB
    return fit(folder, process_group_backend="gloo")


def assert_cluster_and_peak(found: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert found["device"] == "cuda:0"
    hardware: Cluster = found["plan"].cluster
    assert hardware.device.startswith("cuda: ")
    assert {name: getattr(hardware, name) for name in cluster} == cluster
    predicted = found["plan"].predicted.peak_memory_bytes
    assert 0.8 <= max(found["peaks"][1:]) / predicted <= 1.02  # in the first step, states are made


def test_fit_on_one_gpu_peaks_as_predicted(tmp_path: Path) -> None:
    (found,) = run_ranks(fit_on_one_gpu, 1, str(tmp_path), free_port())
    assert_cluster_and_peak(found, {"ranks": 1, "backend": "nccl"})


def test_fit_with_ranks_sharing_a_gpu_peaks_as_predicted(tmp_path: Path) -> None:
    found = run_ranks(fit_on_shared_gpu, RANKS, str(tmp_path), free_port())
    for each in found:
        assert_cluster_and_peak(each, {"ranks": 2, "backend": "gloo", "reduce_scatter_copy_factor": 1.0})
    assert found[0]["plan"] == found[1]["plan"]
