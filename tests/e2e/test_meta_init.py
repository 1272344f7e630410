"""Modules that were built on the meta device: first values, one operator at a time, the same everywhere."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lightning_osdp.backend import memory
from lightning_osdp.backend.cpu import malloc
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.meta_init import MetaInitializer, check_initializable, is_meta
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.choices import Mode
from tests.support.lightning_contract import (
    CLASSES,
    FEATURES,
    HIDDEN,
    RANKS,
    batches,
    build_seeded,
    make_planned_trainer,
)
from tests.support.models import hand_made_plan
from tests.support.modules import trainer
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


class Late(pl.LightningModule):
    """Built in configure_model, without memory."""

    def __init__(self, lr: float = 0.0) -> None:
        super().__init__()
        self.lr = lr
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                layers = [nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
                self.net = nn.Sequential(*layers, nn.Linear(HIDDEN, CLASSES))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.log("loss", functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=self.lr)  # makes its state at once


def unsharded_weights(made: pl.Trainer) -> dict[str, Tensor]:
    """Those that training may change, whole, on the first rank."""
    state = made.strategy.lightning_module_state_dict()
    return {name: value for name, value in state.items() if name.endswith(("weight", "bias"))}


def fit_meta_modules(folder: str) -> dict[str, Any]:
    """First values under two plans (nothing is learnt), after training, and in validation alone."""
    data, found = batches(2, 4), {}
    for name, shift, lr in (("one plan", 1, 0.0), ("another", 2, 0.0), ("trained", 2, 0.1)):
        module = Late(lr)
        torch.manual_seed(5 + dist.get_rank())  # the ranks agree even where their random states don't
        probe = Late(lr)
        probe.configure_model()
        made = make_planned_trainer(folder, probe, data, shift=shift)
        torch.manual_seed(5 + dist.get_rank())
        made.fit(module, data)
        found[name] = unsharded_weights(made)
    alone = Late()
    torch.manual_seed(5)
    found["validated"] = make_planned_trainer(folder, probe, data).validate(alone, data, verbose=False)
    found["sum"] = [float(p.detach().sum()) for p in alone.parameters()]
    return found


def describe_init_module_tensors(folder: str) -> list[str]:
    """Where ``trainer.init_module`` makes tensors, and what type they have."""
    made = trainer(folder, "osdp", precision="bf16-true")
    with made.init_module():
        here = nn.Linear(2, 2)
    with made.init_module(empty_init=True):
        nowhere = nn.Linear(2, 2)
    return [f"{layer.weight.device} {layer.weight.dtype}" for layer in (here, nowhere)]


def peak_growth_bytes(layers: int, width: int) -> int:
    """How far the resident size rises while a model is initialised and sharded over the ranks."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    plan = hand_made_plan({str(index): Mode.ZDP for index in range(layers)}, RANKS)
    engine = FairScaleEngine(CPU)
    gc.collect()
    before = memory.memory_in_use(CPU)
    memory.reset_peak(CPU)
    engine.apply(model, plan, [])
    return memory.peak_memory(CPU) - before


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """All in the same processes."""
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    malloc.configure_cpu_allocator()
    small = peak_growth_bytes(2, 512)  # whatever is allocated once
    large = peak_growth_bytes(16, 1024)
    return {
        "late": fit_meta_modules(folder),
        "init_module": describe_init_module_tensors(folder),
        "small": small,
        "large": large,
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank returned."""
    return run_ranks(run_all, RANKS, str(tmp_path_factory.mktemp("late")))


def test_meta_init_values_do_not_depend_on_plan(results: list[dict[str, Any]]) -> None:
    one, another, trained = (results[0]["late"][name] for name in ("one plan", "another", "trained"))
    assert all(torch.equal(one[name], another[name]) for name in one)
    assert all(not torch.equal(one[name], trained[name]) for name in one)


def test_meta_init_values_come_from_reset_parameters(results: list[dict[str, Any]]) -> None:
    values = results[0]["late"]["one plan"]
    bound = FEATURES**-0.5
    assert bound * 0.8 < values["net.0.weight"].abs().max() <= bound
    assert values["net.0.weight"].unique().numel() == FEATURES * HIDDEN
    assert torch.equal(values["net.1.weight"], torch.ones(HIDDEN))


def test_validate_of_meta_module_has_equal_values_on_all_ranks(results: list[dict[str, Any]]) -> None:
    first, second = (result["late"] for result in results)
    assert first["sum"] == second["sum"]
    assert first["validated"] == second["validated"]


def test_init_module_creates_tensors_on_cpu_or_meta(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["init_module"] == ["cpu torch.bfloat16", "meta torch.bfloat16"]


def test_meta_init_never_holds_unsharded_model_on_any_rank(results: list[dict[str, Any]]) -> None:
    whole, layer = 16 * 1024 * 1024 * 4, 1024 * 1024 * 4
    for result in results:
        assert result["large"] - result["small"] < whole / RANKS + 5 * layer
        assert result["large"] > whole / RANKS


class Own(nn.Module):
    """A parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


class Reset(Own):
    """Fills the parameter."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class ResetAll(Reset):
    """And the buffer."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.mask.fill_(True)


class Outer(nn.Module):
    """Initialises what is inside as GPTs do, on top of what that does itself, and ties two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5, bias=True)
        self.head.weight = self.embed.weight

    def _init_weights(self, inner: nn.Module) -> None:
        if isinstance(inner, nn.Embedding | nn.Linear):
            nn.init.constant_(inner.weight, 7.0 if isinstance(inner, nn.Embedding) else 8.0)


def build_on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        return build()


def test_meta_init_without_reset_parameters_raises_and_changes_nothing() -> None:
    module = nn.Sequential(build_on_meta(lambda: nn.Linear(2, 2)), build_on_meta(Own))
    with pytest.raises(
        ConfigurationError, match=r"1 \(Own\) was built on the meta device, but has no reset_parameters"
    ):
        check_initializable(module)
    assert all(p.is_meta for p in module.parameters())


def test_meta_init_names_buffers_that_reset_parameters_leaves_out() -> None:
    module = build_on_meta(Reset)
    check_initializable(module)
    with pytest.raises(ConfigurationError, match=r"Reset was built .* gives no values to mask: let it do so"):
        MetaInitializer(module, CPU).fill(module)
    module = build_on_meta(ResetAll)
    MetaInitializer(module, CPU).fill(module)
    assert not is_meta(module)
    assert module.mask.all()


def test_meta_init_applies_outer_init_weights_last_and_keeps_tied_weights() -> None:
    module = build_on_meta(Outer)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    MetaInitializer(module, CPU).fill(module)
    assert module.head.weight is module.embed.weight
    assert optimizer.param_groups[0]["params"][0] is module.embed.weight
    assert torch.equal(module.embed.weight, torch.full((5, 4), 7.0))
    assert torch.equal(module.norm.weight, torch.ones(4))
    assert module.head.bias.abs().max() > 0


def test_meta_init_advances_random_state_by_one_draw_for_any_size() -> None:
    after = []
    for width in (2, 64):
        torch.manual_seed(3)
        module = build_on_meta(lambda width=width: nn.Linear(width, width))
        MetaInitializer(module, CPU).fill(module)
        after.append(torch.rand(1))
    assert torch.equal(*after)


def test_meta_init_of_transformers_model_follows_its_config() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    module = build_on_meta(lambda: transformers.LlamaForCausalLM(config))
    check_initializable(module)
    MetaInitializer(module, CPU).fill(module)
    assert not is_meta(module)
    assert 0.4 < float(module.model.embed_tokens.weight.detach().std()) < 0.6
    expected = transformers.LlamaForCausalLM(config).model.rotary_emb.inv_freq
    assert torch.equal(module.model.rotary_emb.inv_freq, expected)
    assert build_seeded(lambda: module(torch.tensor([[1, 2, 3]])).logits).isfinite().all()
