"""What makes something else of a module: files of transformers, exported programs, norms over several modules."""

from __future__ import annotations

import copy
import os
import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_osdp import OSDPStrategy, ShardingError
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from tests.support.models import gpt_batches, hand_made_plan, modes_for
from tests.support.modules import trainer
from tests.support.plans import plan_for
from tests.support.ranks import run_ranks

POLICIES = ("zdp", "zdp2", "mixed")
TRACERS = ("torch.export", "torch.jit.trace", "torch.jit.script", "torch.fx make_fx")
WRAPPERS: tuple[Any, ...] = (DistributedDataParallel, FullyShardedDataParallel, fully_shard)
NOT_TRACED = (
    "a sharded module can't be exported, compiled or traced, since it gathers its weights while it runs: do it "
)
NOT_WRAPPED = (
    r"a sharded module can't be wrapped again \(torch\.\S+\), since its strategy .* or wrap it after the run, "
)


class Language(pl.LightningModule):
    """A small GPT-2 with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16, **no_dropout)
        self.model = GPT2LMHeadModel(config)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        (tokens,) = batch
        return self.model(tokens, labels=tokens).loss + self.layers(tokens[:, :4].float()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        tokens = gpt_batches(4, 4)[:, :, :8].reshape(16, 8) % 64
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(tokens), batch_size=2)


class Exporter(pl.Callback):
    """Saves and traces in the middle of training."""

    def __init__(self, folder: str) -> None:
        self.folder, self.refusals = folder, dict[str, str]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index != 1:
            return
        module.model.save_pretrained(f"{self.folder}/saved", is_main_process=trainer.is_global_zero)
        if "ddp" in self.folder:
            return
        for name in (*TRACERS, "torch.export, strict", "torch.compile"):
            with pytest.raises(ShardingError) as caught:
                trace(name, module.layers)
            self.refusals[name] = str(caught.value)
        for wrap in WRAPPERS:
            with pytest.raises(ShardingError) as caught:
                wrap(module.layers)
            self.refusals[wrap.__name__] = str(caught.value)


def trace(name: str, layers: nn.Module) -> Tensor:
    example = (torch.ones(2, 4),)
    if name == "torch.compile":
        return torch.compile(layers, backend="eager")(*example)  # type: ignore[no-any-return]
    if name == "torch.jit.script":
        return torch.jit.script(layers)(*example)  # type: ignore[no-any-return]
    if name == "torch.fx make_fx":
        return make_fx(layers)(*example)(*example)  # type: ignore[no-any-return]
    if name.startswith("torch.export"):
        program = torch.export.export(layers, example, strict=name.endswith("strict"))
        return program.module()(*example)  # type: ignore[no-any-return]
    return torch.jit.trace(layers, example)(*example)  # type: ignore[no-any-return, no-untyped-call]


def fit(folder: str, policy: str) -> dict[str, Any]:
    module, exporter = Language(), Exporter(f"{folder}/{policy}")
    strategy: Any = "ddp"
    if policy != "ddp":
        strategy = OSDPStrategy(plan=plan_for(Language(), next(iter(module.train_dataloader())), 2, policy, 2))
    trainer(folder, strategy, max_steps=3, callbacks=[exporter]).fit(module)
    dist.barrier()
    saved = GPT2LMHeadModel.from_pretrained(f"{folder}/{policy}/saved").state_dict()
    with torch.no_grad():
        after = {name: (trace(name, module.layers) - module.layers(torch.ones(2, 4))).abs().max() for name in TRACERS}
    return {
        "saved": {name: value.clone() for name, value in saved.items()},
        "files": sorted(os.listdir(Path(folder, policy, "saved"))),
        "refusals": exporter.refusals,
        "after": {name: float(value) for name, value in after.items()},
        "weights": copy.deepcopy(module.state_dict()),
    }


def clip_two_modules(rank: int, ranks: int) -> list[float]:
    """Norms of the gradients of two sharded modules and a replicated one, and of what is left when they are clipped."""
    found = []
    for modes in ("", "zdp"):
        torch.manual_seed(2)
        modules = [nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(3)]
        engines = []
        for module in modules[:2] if modes else ():
            engines.append(FairScaleEngine(torch.device("cpu")))
            engines[-1].apply(module, hand_made_plan(modes_for(module, modes), ranks))
        for module in modules:
            module(torch.ones(2, 6)).square().sum().backward()
        for engine in engines:
            engine.finish_backward()
        parameters = [p for module in modules for p in module.parameters()]
        for norm_type in (2.0, float("inf"), 1.0):
            found.append(float(nn.utils.get_total_norm([p.grad for p in parameters], norm_type)))  # type: ignore[misc]
        found.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
        found.append(float(nn.utils.get_total_norm([p.grad for p in parameters])))  # type: ignore[misc]
        for engine in engines:
            engine.close()
    return found


def run_after_failed_gather(ranks: int) -> list[Any]:
    """What a run raises whose gather fails, and how far the next one is from the whole module's result."""
    found: list[Any] = []
    for mode in ("zdp", "zdp2"):
        torch.manual_seed(1)
        module, x = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)), torch.ones(2, 6)
        expected, engine = module(x).detach(), FairScaleEngine(torch.device("cpu"))
        engine.apply(module, hand_made_plan(modes_for(module, mode), ranks))
        unit: Any = module[0].forward.func.__self__  # type: ignore[union-attr]
        gather, unit._coalesced_gather.gather = unit._coalesced_gather.gather, find_no_memory
        with pytest.raises(RuntimeError) as caught:
            module(x)
        unit._coalesced_gather.gather = gather
        with torch.no_grad():
            found.append((str(caught.value), float((module(x) - expected).abs().max())))
        engine.close()
    return found


def find_no_memory(*_: Any) -> None:
    raise RuntimeError("no memory")


def run_all(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {policy: fit(folder, policy) for policy in ("ddp", *POLICIES)} | {
        "norms": clip_two_modules(rank, ranks),
        "failed gather": run_after_failed_gather(ranks),
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank got."""
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("exports")))


@pytest.mark.parametrize("policy", POLICIES)
def test_save_pretrained_in_a_callback_writes_the_weights_of_ddp(results: list[dict[str, Any]], policy: str) -> None:
    for result in results:
        assert result[policy]["files"] == result["ddp"]["files"]
        torch.testing.assert_close(result[policy]["saved"], result["ddp"]["saved"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_tracing_or_wrapping_a_sharded_module_is_refused_and_changes_nothing(
    results: list[dict[str, Any]], policy: str
) -> None:
    for result in results:
        refusals = result[policy]["refusals"]
        assert len(refusals) == len(TRACERS) + 2 + len(WRAPPERS)
        for name, text in refusals.items():
            assert re.match(NOT_TRACED if name.startswith("torch.") else NOT_WRAPPED, text), text
        torch.testing.assert_close(result[policy]["weights"], result["ddp"]["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_module_can_be_traced_after_its_run(results: list[dict[str, Any]], policy: str) -> None:
    for result in results:
        assert all(difference < 1e-6 for difference in result[policy]["after"].values())


def test_norm_over_modules_of_several_engines_counts_each_element_once(results: list[dict[str, Any]]) -> None:
    for result in results:
        norms = result["norms"]
        assert norms[5:] == pytest.approx(norms[:5], rel=1e-5)
        assert norms[-1] == pytest.approx(0.5, rel=1e-4)


def test_run_after_a_gather_that_failed_gathers_anew(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["failed gather"] == [("no memory", 0.0)] * 2
