"""Repeated blocks and splittable operators, as they are read from a traced step."""

from __future__ import annotations

import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_osdp.planning.cost.step_time import forward_backward_time
from lightning_osdp.planning.spec.choices import Mode, ShardingChoice
from lightning_osdp.planning.spec.constraints import SearchConstraints
from lightning_osdp.planning.spec.model import UNATTRIBUTED, ModelProfile
from lightning_osdp.profiling.compute import measure_compute
from lightning_osdp.profiling.tracing.trace import TracedStep
from tests.support.traced_models import trace

CPU = torch.device("cpu")
WIDTH = 32


class Residual(nn.Module):
    """x + down(gelu(up(x))): keeps its input, and twice the hidden layer."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Stack(pl.LightningModule):
    """Residual blocks, run as ``how`` says."""

    def __init__(self, blocks: nn.Module, how: str = "once") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = blocks
        self.how = how

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for _ in range(2 if self.how == "twice" else 1):
            for block in self.blocks.children():
                x = checkpoint(block, x, use_reentrant=False) if self.how == "checkpointed" else block(x)
        return x.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def trace_stack(blocks: nn.Module, how: str = "once") -> TracedStep:
    return trace(Stack(blocks, how), torch.randn(4, WIDTH), 4, device=CPU)


def describe_stack(blocks: nn.Module, how: str = "once") -> ModelProfile:
    return trace_stack(blocks, how).model_profile


def test_describe_blocks_lists_container_members_with_recompute_savings() -> None:
    found = describe_stack(nn.ModuleList(Residual() for _ in range(3)))
    assert [block.name for block in found.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert {block.kind for block in found.blocks} == {"Residual in blocks"}
    assert not any(block.recompute_blocker for block in found.blocks)
    for index, block in enumerate(found.blocks):
        names = [found.operators[operator].name for operator in block.operators]
        assert names == [f"blocks.{index}.up", f"blocks.{index}.down"]
        # The hidden layer before and after gelu, in fp32; its output belongs to the next block.
        assert block.recompute_saves.per_sample == 2 * 4 * WIDTH * 4
        assert block.recompute_saves.fixed == 0
        phases = [found.moments[block.forward[0]].phase, found.moments[block.backward[0]].phase]
        assert phases == ["forward", "backward"]
        inside = {moment.operator for moment in found.moments[block.forward[0] : block.forward[1] + 1]}
        assert inside == {UNATTRIBUTED, *block.operators}
    first, second = found.blocks[:2]
    assert first.forward[1] < second.forward[0] < second.backward[0] <= second.backward[1] < first.backward[0]
    assert second.live_before_forward.per_sample - first.live_before_forward.per_sample == (2 * 4 + 1) * WIDTH * 4


class ReadsNoInput(nn.Module):
    """Its backward needs three results of the size of its input, but not the input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.linear((x + shift).sigmoid()).tanh().sigmoid() + 1


def test_describe_blocks_counts_inputs_that_only_recomputing_keeps_in_the_first_block_that_gets_them() -> None:
    class Shifted(Stack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x, shift = self.first(batch), 2 * batch
            for block in self.blocks.children():
                x = block(x, shift=shift)
            return x.square().sum()

    module = Shifted(nn.ModuleList(ReadsNoInput() for _ in range(3)))
    found = trace(module, torch.randn(4, WIDTH), 4, device=CPU).model_profile
    row = WIDTH * 4
    assert [block.kept_inputs.per_sample for block in found.blocks] == [2 * row, row, row]
    assert [block.recompute_saves.per_sample for block in found.blocks] == [row, 2 * row, 2 * row]
    residual = describe_stack(nn.ModuleList(Residual() for _ in range(2)))  # keeps its input anyway
    assert [block.kept_inputs.per_sample for block in residual.blocks] == [0, 0]


def test_describe_blocks_lists_numbered_siblings_and_no_others() -> None:
    class Named(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, Residual())

    assert [block.name for block in describe_stack(Named("layer1", "layer2")).blocks] == [
        "blocks.layer1",
        "blocks.layer2",
    ]
    assert describe_stack(Named("encoder", "decoder")).blocks == ()
    assert describe_stack(nn.ModuleList([Residual()])).blocks == ()  # nothing repeats


def test_describe_blocks_of_nested_repetition_lists_outermost_only() -> None:
    nested = nn.Sequential(*(nn.Sequential(Residual(), Residual()) for _ in range(2)))
    assert [block.name for block in describe_stack(nested).blocks] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize(
    ("norm", "how", "reason"),
    [
        (True, "once", r"blocks.0.norm (BatchNorm1d) changes its buffers in every forward"),
        (False, "twice", "it runs 2 times in one forward pass"),
        (False, "checkpointed", "the model recomputes blocks.0 by itself"),
    ],
)
def test_describe_blocks_recompute_blocker_names_reason(norm: bool, how: str, reason: str) -> None:
    found = describe_stack(nn.ModuleList(Residual(norm) for _ in range(2)), how)
    assert len(found.blocks) == 2
    assert found.blocks[0].recompute_blocker.startswith(reason)


class Counts:
    """An object of the user's."""

    def __init__(self) -> None:
        self.runs = 0


class Keeping(Residual):
    """Keeps something from one run to the next, or changes what it is given, as ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.runs, self.counts, self.seen = kind, 0, Counts(), [0]
        self.rng, self.arrays = random.Random(1), np.random.default_rng(1)
        self.register_buffer("mean", torch.zeros(()))
        self.total, self.result = torch.zeros(()), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(self, f"_{self.kind}")(x)
        return super().forward(x if y is None else y)

    def _input(self, x: Tensor) -> None:
        x.mul_(0.5)

    def _view_of_input(self, x: Tensor) -> None:
        x[:, 1:] += 1

    def _replaced_buffer(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + x.detach().mean()
        return x * (1 + self.mean)

    def _total_of_a_metric(self, x: Tensor) -> None:
        self.total += x.detach().sum()

    def _counter(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x * self.runs

    def _object(self, x: Tensor) -> None:
        self.counts.runs += 1

    def _list(self, x: Tensor) -> None:
        self.seen.append(1)

    def _generator(self, x: Tensor) -> Tensor:
        return x * self.rng.random()

    def _generator_of_numpy(self, x: Tensor) -> Tensor:
        return x * self.arrays.random()

    def _result(self, x: Tensor) -> Tensor:
        """Nothing reads what it replaces, nor was there before what it changes in place."""
        self.result = x.detach() + 1
        y = x + 1
        return y.mul_(2)

    def _nothing(self, x: Tensor) -> Tensor:
        """Those numbers are the same when it runs again."""
        return x * random.random() * float(np.random.rand())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("input", "blocks.2 (Keeping) changes in place what it is given"),
        ("view_of_input", "blocks.2 (Keeping) changes in place what it is given"),
        ("replaced_buffer", "blocks.2.mean changes in every forward: a second one would do it twice"),
        ("total_of_a_metric", "blocks.2 (Keeping) changes in place what it is given"),
        ("counter", "blocks.2.runs changes in every forward"),
        ("object", "blocks.2.counts changes in every forward"),
        ("list", "blocks.2.seen changes in every forward"),
        ("generator", "blocks.2.rng changes in every forward"),
        ("generator_of_numpy", "blocks.2.arrays changes in every forward"),
        ("result", ""),
        ("nothing", ""),
    ],
)
def test_blocks_that_a_second_run_would_find_changed_are_not_recomputed(kind: str, reason: str) -> None:
    found = describe_stack(nn.ModuleList(Keeping(kind) for _ in range(3)))
    blocker = found.blocks[-1].recompute_blocker
    assert blocker.startswith(reason) if reason else not blocker, blocker


def test_describe_blocks_recompute_blocker_names_tied_weight() -> None:
    blocks = nn.ModuleList(Residual() for _ in range(2))
    blocks[1].up.weight = blocks[0].up.weight
    found = describe_stack(blocks)
    assert all(block.recompute_blocker == "blocks.0.up.weight is also used outside of it" for block in found.blocks)


def test_trace_records_split_dims_and_sizes_of_operators() -> None:
    found = {
        operator.name: operator for operator in describe_stack(nn.ModuleList(Residual() for _ in range(2))).operators
    }
    up = found["blocks.0.up"]
    assert (up.split_dims, up.output_dims) == ((1, 0), (0,))
    assert (up.input_per_sample, up.output_per_sample) == (WIDTH * 4, 4 * WIDTH * 4)
    assert found["first"].input_per_sample == 0  # the batch gets no gradient


def test_measure_compute_times_slices_and_blocks() -> None:
    read_ = trace_stack(nn.ModuleList(Residual() for _ in range(2)))
    times = measure_compute(read_, CPU, time_budget_s=1.0, constraints=SearchConstraints(4))
    assert len(times.blocks) == 2
    for operator, time in zip(read_.model_profile.operators, times.operators, strict=True):
        (split,) = time.splits
        assert (split.dim, split.slices) == (operator.split_dims[0], 4)
        lines = forward_backward_time(time, ShardingChoice((Mode.ZDP,) * 4, split_dim=split.dim))
        for line, whole in zip(lines, (time.forward, time.backward), strict=True):
            assert all(line.value_at(size) >= whole.value_at(size) for size in (2, 8, 64)), (
                "splits save no time, whatever the size"
            )
            assert line.value_at(8) > 0
    assert all(block.value_at(8) > 0 for block in times.blocks)
    assert sum(block.value_at(8) for block in times.blocks) <= times.unattributed.forward.value_at(8) * (1 + 1e-6)
    assert not any(
        time.splits for time in measure_compute(read_, CPU, time_budget_s=1.0).operators
    )  # too small to be offered
