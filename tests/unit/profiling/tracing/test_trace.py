"""What a trace says of operators, parameters, optimizer states and live bytes, and what it leaves alone."""

from __future__ import annotations

import queue
import random
import resource
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.autotune.pipeline import profile_model
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import ConfigurationError, OSDPWarning, TraceError
from lightning_osdp.planning.spec.model import UNATTRIBUTED, WHOLE_MODEL, ModelProfile, Operator
from lightning_osdp.profiling.tracing.trace import _affordable_sizes, _saturating_sizes
from tests.support.traced_models import Regression, TinyGPT, adamw, tokens, trace, trace_by_running

CPU = torch.device("cpu")


def describe(module: LightningModule, batch: Any, batch_size: int = 4) -> ModelProfile:
    return trace(module, batch, batch_size, device=CPU).model_profile


def by_name(description: ModelProfile) -> dict[str, Operator]:
    return {operator.name: operator for operator in description.operators}


def parameter_names(operator: Operator) -> list[str]:
    return [parameter.name for parameter in operator.parameters]


# -- operators ---------------------------------------------------------------------------------------------------------


def test_trace_gpt_lists_operators_in_order_of_use_and_parameters_once() -> None:
    module = TinyGPT()
    description = describe(module, tokens())
    block = ["norm", "attn", "up", "down"]
    assert [operator.name for operator in description.operators] == [
        "tokens",
        *(f"blocks.{index}.{name}" for index in range(2) for name in block),
        "norm",
        "head",
    ]
    found = [name for operator in description.operators for name in parameter_names(operator)]
    assert sorted(found) == sorted(name for name, _ in module.named_parameters())
    assert description.num_parameters == sum(p.numel() for p in module.parameters())
    assert all(operator.calls == 1 and not operator.replicated_reason for operator in description.operators)
    assert by_name(description)["blocks.0.norm"].signature == by_name(description)["blocks.1.norm"].signature


def test_trace_attention_owns_projection_it_reads_without_calling() -> None:
    attention = by_name(describe(TinyGPT(), tokens()))["blocks.1.attn"]
    assert attention.kind == "MultiheadAttention"
    assert {name.removeprefix("blocks.1.attn.") for name in parameter_names(attention)} == {
        "in_proj_weight",
        "in_proj_bias",
        "out_proj.weight",
        "out_proj.bias",
    }


def test_trace_tied_embedding_is_owned_by_whole_model() -> None:
    operators = by_name(describe(TinyGPT(tied=True), tokens()))
    whole = operators[WHOLE_MODEL]
    assert whole.replicated_reason == "tied across the model: tokens.weight = head.weight"
    assert whole.parameters[0].aliases == ("head.weight",)
    assert "tokens" not in operators
    assert "head" not in operators
    assert not whole.is_shardable


def test_trace_tied_weight_has_one_gradient_plus_temporary_sum() -> None:
    """The head's part is what the embedding's is added to: it is a gradient from the start, not an activation. It is a
    transposed product, to which autograd does not add in place: for a moment there is the sum, too."""
    description = describe(TinyGPT(vocabulary=1 << 14, tied=True), tokens())
    weight = next(p.parameter_bytes for one in description.operators for p in one.parameters if p.aliases)
    backward = [moment for moment in description.moments if moment.phase == "backward"]
    inside = [m.live.fixed for m in backward if m.operator != UNATTRIBUTED and description.operators[m.operator].name]
    assert max(inside) < weight / 2
    most = max(moment.live.fixed for moment in backward)
    assert 2 * weight <= most < 2.5 * weight, "the embedding's part and the sum"


class BareParameter(Regression):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.net(batch) * self.scale).sum()


def test_trace_bare_parameter_of_training_step_is_owned_by_whole_model() -> None:
    operators = by_name(describe(BareParameter(), torch.ones(4, 8)))
    assert parameter_names(operators[WHOLE_MODEL]) == ["scale"]
    assert operators[WHOLE_MODEL].replicated_reason == "used by the whole model"
    assert not operators["net"].replicated_reason


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gamma = nn.Parameter(torch.ones(8))
        self.idle = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.inner(x)


def test_trace_enclosing_module_and_unused_parameters_stay_replicated() -> None:
    operators = by_name(describe(Regression(nn.Sequential(LayerScale())), torch.ones(4, 8)))
    assert list(operators) == ["net.0.inner", "net.0", "net.0.idle"]
    assert operators["net.0"].replicated_reason.startswith("its forward runs other operators: net.0.inner")
    assert operators["net.0.idle"].replicated_reason == "not used in the traced step"
    assert not operators["net.0.inner"].replicated_reason


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.left, self.right = nn.Sequential(self.shared), nn.Sequential(nn.ReLU(), self.shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x))


def test_trace_module_used_twice_counts_two_calls() -> None:
    (operator,) = describe(Regression(Twice()), torch.ones(4, 8)).operators
    assert (operator.name, operator.calls, operator.replicated_reason) == ("net.shared", 2, "")


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_trace_recomputation_is_not_a_second_call(reentrant: bool) -> None:
    description = describe(Regression(Recomputed(reentrant)), torch.ones(4, 8))
    assert [(operator.name, operator.calls) for operator in description.operators] == [
        ("net.first", 1),
        ("net.second", 1),
    ]


def test_trace_weight_norm_is_owned_by_its_linear() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    (operator,) = describe(Regression(nn.Sequential(linear)), torch.ones(4, 8)).operators
    assert operator.name == "net.0"
    assert len(operator.parameters) == 3
    assert not operator.replicated_reason


def test_trace_compiled_module_stays_replicated() -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    net.compile(backend="eager")
    (operator,) = describe(Regression(net), torch.ones(4, 8)).operators
    assert operator.replicated_reason == "compiled by torch.compile"


def test_trace_parameter_in_shared_memory_stays_replicated_on_cpu() -> None:
    model = Regression(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    model.net[0].weight.data.share_memory_()
    reasons = [each.replicated_reason for each in describe(model, torch.ones(4, 4)).operators]
    assert "net.0.weight lies in memory that is shared with other processes" in reasons[0]
    assert reasons[1] == ""


def test_trace_frozen_parameters_have_neither_gradient_nor_state() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].requires_grad_(False)
    operators = by_name(describe(Regression(net), torch.ones(4, 8)))
    assert [p.state_bytes - p.parameter_bytes for p in operators["net.0"].parameters] == [0, 0]
    assert all(p.optimizer_bytes > 0 for p in operators["net.1"].parameters)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.LSTM(8, 6, batch_first=True), (4, 5, 8)),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)),
            (4, 3, 8, 8),
        ),
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (4, 5, 8)),
    ],
    ids=["lstm", "cnn", "transformer"],
)
def test_trace_of_common_networks_equals_trace_by_running(net: nn.Module, shape: tuple[int, ...]) -> None:
    module = Regression(net)
    description = describe(module, torch.ones(shape))
    assert all(not operator.replicated_reason for operator in description.operators)
    assert description.num_parameters == sum(p.numel() for p in module.parameters())
    assert description.buffer_bytes == sum(b.nbytes for b in module.buffers())
    real = trace_by_running(module, torch.ones(shape), 4, device=CPU).model_profile
    assert real.operators == description.operators


# -- optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "factor", "extra"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 0, 0),
        (lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)], 1, 0),
        (lambda m: ([torch.optim.AdamW(m.parameters())], []), 2, 4),
        (lambda m: None, 0, 0),
    ],
    ids=["sgd", "momentum", "adamw", "none"],
)
def test_trace_counts_optimizer_states_from_the_optimizer(optimizer: Any, factor: int, extra: int) -> None:
    description = describe(Regression(nn.Linear(8, 8), optimizer), torch.ones(4, 8))
    for parameter in description.operators[0].parameters:
        assert parameter.trainable
        assert parameter.optimizer_bytes == factor * parameter.parameter_bytes + extra


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Muon])
def test_trace_parameters_of_non_elementwise_optimizers_stay_replicated(optimizer: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    module = Regression(net, lambda m: [optimizer([m.net[0].weight], lr=1e-3), adamw(m.net[1])])
    module.automatic_optimization = False
    operators = describe(module, torch.randn(4, 8)).operators
    assert operators[0].replicated_reason == f"its optimizer ({optimizer.__name__}) looks at whole tensors"
    assert operators[1].replicated_reason == ""


@pytest.mark.parametrize(
    "optimizer", [torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam, torch.optim.Rprop]
)
def test_trace_parameters_of_elementwise_optimizers_can_be_sharded(optimizer: Any) -> None:
    module = Regression(nn.Linear(8, 8), lambda m: optimizer(m.parameters(), lr=1e-3))
    assert [operator.replicated_reason for operator in describe(module, torch.randn(4, 8)).operators] == [""]


def test_trace_parameter_without_optimizer_has_gradient_but_no_state() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module = Regression(net, lambda m: torch.optim.AdamW(m.net[0].parameters()))
    left_out = by_name(describe(module, torch.ones(4, 8)))["net.1"].parameters[0]
    assert (left_out.optimizer_bytes, left_out.gradient_bytes) == (0, 256)


@pytest.mark.parametrize(("foreach", "of"), [(False, "largest"), (True, "total")])
def test_trace_optimizer_temporaries_are_largest_for_loop_total_for_foreach(foreach: bool, of: str) -> None:
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    module = Regression(net, lambda m: torch.optim.AdamW(m.parameters(), foreach=foreach))
    step = describe(module, torch.ones(4, 16)).optimizer_step
    assert step.temporaries_of == of
    assert 1.0 <= step.temporary_factor <= 3.0


# -- live bytes --------------------------------------------------------------------------------------------------------


def test_trace_live_bytes_of_two_layer_network_match_hand_computation() -> None:
    """Linear(3, 5), ReLU, Linear(5, 2), mean of squares; fp32, so 4 bytes an element; b samples.

    The batch (b, 3) takes 12b, the hidden layer (b, 5) 20b before and 20b after the ReLU, the output (b, 2) 8b, its
    squares 8b, the mean 4. Autograd keeps the batch, the ReLU's output and the output.
    """
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    moments = describe(Regression(net), torch.ones(4, 3)).moments
    found = [(m.phase, m.operator, m.live.fixed, m.live.per_sample) for m in moments]
    assert found == [
        ("forward", 0, 0, 12 + 20),
        ("forward", UNATTRIBUTED, 0, 12 + 20 + 20),
        ("forward", 1, 0, 12 + 20 + 8),  # Sequential has let go of what went into the ReLU
        ("forward", UNATTRIBUTED, 4, 12 + 20 + 8 + 8),
        # 8 fixed: the loss and its gradient, which backward() holds to its end. The squares take 8 four times: their
        # gradient, x ** 1, twice that, and the product
        ("backward", UNATTRIBUTED, 8, 12 + 20 + 8 + 4 * 8),
        ("backward", 1, 8, 12 + 20 + 8 + 20),  # the output's gradient and the hidden layer's
        ("backward", UNATTRIBUTED, 8, 12 + 20 + 20 + 20),
        ("backward", 0, 8, 12 + 20),
    ]


def test_trace_fixed_live_bytes_exclude_parameters_gradients_and_states() -> None:
    net = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300))
    moments = describe(Regression(net), torch.ones(4, 300)).moments
    assert max(moment.live.fixed for moment in moments) < 100


class Meeting(Regression):
    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        y = self.net(batch)
        return (y.neg() + y.neg()).sum()


def test_trace_adds_gradients_of_shared_tensor_in_place() -> None:
    """(b, 8) fp32 is 32b: the batch and the two gradients of y. Their sum takes no third place."""
    moments = describe(Meeting(nn.Linear(8, 8, bias=False)), torch.ones(4, 8)).moments
    outside = next(m for m in moments if m.phase == "backward" and m.operator == UNATTRIBUTED)
    assert outside.live.per_sample == 3 * 32


def test_trace_linear_flops_are_6_per_weight_and_4_without_input_gradient() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    operators = by_name(describe(Regression(net), torch.ones(4, 16)))
    assert operators["net.1"].flops_per_sample == 6 * 32 * 8
    assert operators["net.0"].flops_per_sample == 4 * 16 * 32


def test_trace_batch_without_rows_is_constant_with_warning() -> None:
    with pytest.warns(OSDPWarning, match="no tensor of the batch has 4 rows"):
        found = trace(Regression(nn.Linear(8, 8)), torch.ones(7, 8), 4, device=CPU)
    assert list(found.kernels) == [4]
    assert all(moment.live.per_sample == 0 for moment in found.model_profile.moments)


# -- ways to train -----------------------------------------------------------------------------------------------------


class Adversaries(LightningModule):
    """Manual optimization of two networks, each by its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        with self.toggled_optimizer(first):
            loss = self.critic(self.generator(batch)).mean()
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 1.0)
            first.step()
        loss = self.critic(batch).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        first, second = adamw(self.generator), torch.optim.SGD(self.critic.parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]


def test_trace_manual_optimization_records_its_own_backward_calls() -> None:
    description = describe(Adversaries(), torch.ones(4, 8))
    operators = by_name(description)
    assert list(operators) == ["generator", "critic"]
    assert operators["critic"].calls == 2
    assert operators["generator"].parameters[0].optimizer_bytes > 0
    assert operators["critic"].parameters[0].optimizer_bytes == 0
    phases = [moment.phase for moment in description.moments]
    changes = [phase for before, phase in zip([None, *phases], phases, strict=False) if phase != before]
    assert changes == ["forward", "backward", "forward", "backward"]


def test_trace_autocast_leaves_weight_casts_to_the_plan_and_counts_others_as_live() -> None:
    def live(net: nn.Module, autocast: bool) -> tuple[float, int]:
        context = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
        profile = trace(Regression(net), torch.ones(4, 64), 4, device=CPU, step_context=context).model_profile
        assert profile.operators[0].name == "net"
        return profile.moments[0].live.fixed, profile.operators[0].parameters[0].cast_element_bytes

    class ReadTwice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight[0, 0]

    product, twice = nn.Linear(64, 64, bias=False), ReadTwice(64, 64, bias=False)
    assert live(product, True) == (live(product, False)[0], 2)
    kept, cast_bytes = live(twice, True)
    assert (kept - live(twice, False)[0], cast_bytes) == (64 * 64 * 2, 0)


class Marked(LightningModule):
    """Parameters with attributes that the step, and the optimizer's groups, read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(8, 8), nn.Parameter(torch.eye(8))
        self.weight.factor = torch.full((8,), 2.0)  # type: ignore[attr-defined]
        self.first.bias.no_decay = True  # type: ignore[attr-defined]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.first(batch) @ (self.weight * self.weight.factor)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kept = [p for p in self.parameters() if not hasattr(p, "no_decay")]
        left = [p for p in self.parameters() if hasattr(p, "no_decay")]
        assert len(left) == 1
        return torch.optim.AdamW([{"params": kept}, {"params": left, "weight_decay": 0.0}], lr=1e-3)


@pytest.mark.parametrize("how", [trace, trace_by_running])
def test_trace_sees_attributes_of_parameters(how: Any) -> None:
    module = Marked()
    described = how(module, torch.randn(4, 8), 4, device=CPU).model_profile
    assert "first" in by_name(described)
    assert torch.equal(module.weight.factor, torch.full((8,), 2.0))


class ReadsItsTrainer(Regression):
    def training_step(self, batch: Tensor) -> Tensor:
        self.logger.experiment.add_scalar("x", 1.0)
        return super().training_step(batch, 0) * (1 + self.trainer.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


@pytest.mark.parametrize("how", [trace, trace_by_running])
def test_trace_reads_trainer_without_changing_it(how: Any) -> None:
    module = ReadsItsTrainer(nn.Linear(8, 8))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    module.trainer = trainer
    before = dict(module.__dict__)
    assert how(module, torch.ones(4, 8), 4, device=CPU).model_profile.operators[0].name == "net"
    assert module.trainer is trainer
    assert set(module.__dict__) == set(before)
    assert trainer.optimizers == []


# -- what is left alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [trace, trace_by_running])
def test_trace_leaves_parameters_buffers_modes_and_rng_state_untouched(how: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
    net[1].eval()
    module = Regression(net)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in module.state_dict().items()}
    modes = [inner.training for inner in module.modules()]
    states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    how(module, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), 4, device=CPU)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert modes == [inner.training for inner in module.modules()]
    assert pointers == {name: value.data_ptr() for name, value in module.state_dict().items()}
    assert all(torch.equal(values[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_trace_by_running_restores_batch_norm_statistics() -> None:
    module = Regression(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    trace_by_running(module, torch.arange(32.0).view(4, 8), 4, device=CPU)
    assert torch.equal(module.net[1].running_mean, torch.zeros(8))
    assert module.net[1].num_batches_tracked.item() == 0


def test_trace_keeps_existing_gradients() -> None:
    module = Regression(nn.Linear(8, 8))
    module.net.weight.grad = torch.full((8, 8), 3.0)
    trace(module, torch.ones(4, 8), 4, device=CPU)
    assert torch.equal(module.net.weight.grad, torch.full((8, 8), 3.0))


def test_trace_allocates_no_real_tensors() -> None:
    """20000 x 20000 fp32 is 1.5 GiB; the untouched pages of ``empty`` take no memory until someone writes or copies."""
    module = Regression(nn.Identity())
    module.net = nn.Linear(1, 1)
    module.net.weight = nn.Parameter(torch.empty(20000, 20000))
    module.net.bias = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    description = describe(module, torch.ones(4, 20000))
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert description.operators[0].parameters[0].optimizer_bytes == 2 * 4 * 20000**2 + 4
    assert grown_bytes < 400 << 20


def test_trace_of_meta_module_equals_trace_of_module_on_device() -> None:
    with torch.device("meta"):
        module = Regression(nn.Linear(8, 8))
    with torch.device("cpu"):
        real = Regression(nn.Linear(8, 8))
    batch = torch.ones(4, 8)
    assert describe(module, batch) == describe(real, batch)


# -- real steps and errors ---------------------------------------------------------------------------------------------


def test_trace_by_running_equals_fake_trace() -> None:
    module = TinyGPT()
    fake = trace(module, tokens(), 4, device=CPU)
    real = trace_by_running(module, tokens(), 4, device=CPU)
    assert real == fake


def test_trace_evaluation_holds_nothing_for_backward() -> None:
    chain = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    assert describe(Regression(chain), torch.ones(4, 8)).evaluation == ()  # it was not asked for
    description = trace(Regression(chain), torch.ones(4, 8), 4, device=CPU, evaluation=True).model_profile
    row = 8 * 4  # bytes of a sample in any layer
    assert [moment.operator for moment in description.evaluation if moment.operator >= 0] == list(range(5))
    assert {moment.phase for moment in description.evaluation} == {"forward"}
    for moment in description.evaluation[1:5]:  # the batch, a layer's input and its output
        assert moment.live.value_at(4) == 3 * row * 4
    assert max(moment.live.value_at(4) for moment in description.moments) > 6 * row * 4


def test_trace_step_that_needs_gradients_has_no_evaluation() -> None:
    class Penalised(Regression):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            (gradient,) = torch.autograd.grad(loss, next(self.parameters()), create_graph=True)
            return loss + gradient.square().sum()

    description = trace(Penalised(nn.Linear(8, 8)), torch.ones(4, 8), 4, device=CPU, evaluation=True).model_profile
    assert description.moments
    assert description.evaluation == ()


def test_trace_records_gradient_order_of_lstm_layers() -> None:
    stacked = describe(Regression(nn.LSTM(8, 6, 2, batch_first=True)), torch.ones(4, 5, 8)).operators[0]
    assert {p.name.rpartition(".")[2]: p.gradient_order for p in stacked.parameters} == {
        f"{kind}_{where}_l{layer}": 1 - layer  # of a layer all at once, of the last one first
        for layer in range(2)
        for kind in ("weight", "bias")
        for where in ("ih", "hh")
    }


class FixedBatch(Regression):
    """Works with as many samples as its loader gives alone."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + torch.ones(5, 8), batch_idx)


def test_profile_of_step_for_one_batch_size_is_that_of_this_size_alone(tmp_path: Path) -> None:
    batch = torch.ones(5, 8)
    context = TrialContext(FixedBatch(nn.Linear(8, 8)), batch, 5, torch.device("cpu"))
    other = profile_model(replace(context, module=Regression(nn.Linear(8, 8))))
    assert (other.batch_sizes, other.model_profile.only_batch_size) == ((2, 8), 0)
    key = ""
    for _ in range(3):  # traced, recognised, and known from another rank
        with nullcontext() if key else pytest.warns(OSDPWarning, match="works with 5 samples alone"):
            found = profile_model(context, cache=tmp_path, key=key)
        assert (found.batch_sizes, found.model_profile.only_batch_size) == ((5,), 5)
        assert found.with_all_kernels().kernels.keys() == {5}
        key = found.key
    peak, at_any_size = (
        max(moment.live.value_at(5) for moment in each.model_profile.moments) for each in (found, other)
    )
    assert 0 < at_any_size <= peak <= 2 * at_any_size  # the ones are added first


class DataDependent(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > -1 else 2 * loss


def test_trace_rejects_data_dependent_step_that_trace_by_running_accepts() -> None:
    module = DataDependent(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    batch = torch.ones(4, 8)
    with pytest.raises(TraceError, match="the training step of DataDependent can't be traced") as caught:
        trace(module, batch, 4, device=CPU)
    assert caught.value.__cause__ is not None
    plain = Regression(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    real = trace_by_running(module, batch, 4, device=CPU).model_profile
    assert real.operators == describe(plain, batch).operators


class Lossless(Regression):
    def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
        self.net(batch)


def test_trace_rejects_step_without_loss() -> None:
    with pytest.raises(TraceError, match="no loss"):
        trace(Lossless(nn.Linear(8, 8)), torch.ones(4, 8), 4, device=CPU)


def test_trace_rejects_module_without_trainable_parameters() -> None:
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        trace(Regression(nn.Linear(8, 8).requires_grad_(False)), torch.ones(4, 8), 4, device=CPU)


def test_fingerprint_differs_between_models_and_is_reproducible() -> None:
    def fingerprint(module: LightningModule) -> str:
        return describe(module, torch.ones(4, 8)).fingerprint

    plain = fingerprint(Regression(nn.Linear(8, 8)))
    assert plain == fingerprint(Regression(nn.Linear(8, 8)))
    assert plain != fingerprint(Regression(nn.Linear(8, 9)))
    assert plain != fingerprint(Regression(nn.Linear(8, 8, bias=False)))
    frozen = nn.Linear(8, 8)
    frozen.bias.requires_grad_(False)
    assert plain != fingerprint(Regression(frozen))


def test_trace_of_plain_model_emits_no_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        describe(TinyGPT(), tokens())


class LoopGPT(TinyGPT):
    """Its optimizer's temporaries are more than clipping takes."""

    def configure_optimizers(self) -> Any:
        config = super().configure_optimizers()
        for group in config["optimizer"].param_groups:
            group["foreach"] = False
        return config


@pytest.mark.parametrize(("algorithm", "kernel"), [("norm", "linalg_vector_norm"), ("value", "clamp_")])
def test_trace_clipping_adds_optimizer_kernels_and_changes_no_operators(algorithm: str, kernel: str) -> None:
    module = LoopGPT()
    plain = trace(module, tokens(), 4, device=CPU)
    module.__dict__["_trainer"] = SimpleNamespace(
        datamodule=None, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm
    )
    clipped = trace(module, tokens(), 4, device=CPU)
    found = {each.func.overloadpacket.__name__ for each in clipped.optimizer_kernels}
    assert found - {each.func.overloadpacket.__name__ for each in plain.optimizer_kernels}
    assert kernel in found
    assert clipped.model_profile.operators == plain.model_profile.operators
    assert clipped.model_profile.optimizer_step == plain.model_profile.optimizer_step


@pytest.mark.parametrize(("live_gib", "sizes"), [(1, (2, 8)), (16, (2, 8)), (17, (2, 3))])
def test_affordable_sizes_of_a_step_that_takes_gigabytes_lie_close_together(
    live_gib: int, sizes: tuple[int, int]
) -> None:
    assert _affordable_sizes((2, 8), live_gib << 30) == sizes
    assert _affordable_sizes((2,), live_gib << 30) == (2,)


@pytest.mark.parametrize(("live_mib", "larger"), [(1, 64), (256, 64), (257, 32), (1024, 16), (2048, 8), (9999, 8)])
def test_saturating_sizes_grow_larger_batch_size_within_device_memory(live_mib: int, larger: int) -> None:
    device_bytes = 8 << 30  # of which two samples take so much, and 64 samples all of it if they take 256 MiB
    assert _saturating_sizes((2, 8), live_mib << 20, device_bytes) == (2, larger)
    assert _saturating_sizes((4,), live_mib << 20, device_bytes) == (4,), "it does not grow with the batch size"


def test_trace_runs_backward_single_threaded() -> None:
    threads: queue.SimpleQueue[bool] = queue.SimpleQueue()  # unlike those in lists, its items are not taken back

    class Noting(Regression):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            threads.put(torch.autograd.is_multithreading_enabled())
            super().backward(loss, *args, **kwargs)

    trace(Noting(nn.Linear(8, 8)), torch.ones(4, 8), 4, device=CPU)
    assert [threads.get_nowait() for _ in range(threads.qsize())] == [False, False]
    assert torch.autograd.is_multithreading_enabled()
