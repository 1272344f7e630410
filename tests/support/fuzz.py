"""Random modules, steps and callbacks of the kinds that break sharded training, trained by DDP and by OSDP.

A seed decides everything: the layers, the step, the callbacks, the Trainer's arguments and the plan.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.autotune import pipeline
from lightning_osdp.autotune.trial_step import TrialContext
from lightning_osdp.errors import OSDPError
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan, OperatorPlan
from tests.support.fuzz_layers import LAYERS, NEWER_LAYERS, WIDTH
from tests.support.modules import trainer
from tests.support.plans import plan_with

STEPS = 5
ROWS, TIME, BATCH = 32, 4, 3
TOLERANCE = 1e-5

STEP_KINDS = (
    "plain",
    "plain",
    "penalty",
    "late_penalty",
    "input_gradient_penalty",
    "adversarial",
    "manual_two_backwards",
    "adaptive_weight",
    "metric",
)
CALLBACKS = (
    "teacher_by_data",
    "teacher_in_place",
    "scale_weights",
    "clamp_data",
    "log_weight_norms",
    "log_gradient_norms",
    "state_dict",
    "reset_a_layer",
    "score_with_weight",
    "gradient_in_validation",
)

NEWER_CALLBACKS = (
    *CALLBACKS,
    "numpy_statistics",
    "kept_views",
    "freeze_a_layer",
    "parametrize_late",
    "prune_late",
    "replace_a_layer",
    "gradients_by_hand",
)
NEWER_POLICIES = ("zdp", "zdp2", "mixed", "random", "sliced", "tp")
FIRST_NEWER_SEED = 1000
"""Seeds from here on draw from the newer kinds as well; what those before stand for does not change."""


@dataclass(frozen=True)
class Case:
    """What a seed stands for."""

    seed: int
    layers: tuple[str, ...]
    step: str
    callbacks: tuple[str, ...]
    accumulate: int
    clip: float | None
    optimizer: str
    policy: str

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.policy}, step {self.step}, layers {' '.join(self.layers)}, callbacks "
            f"{' '.join(self.callbacks) or '-'}, accumulate {self.accumulate}, clip {self.clip}, {self.optimizer}"
        )


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    is_newer = seed >= FIRST_NEWER_SEED
    layers, callbacks = (NEWER_LAYERS, NEWER_CALLBACKS) if is_newer else (LAYERS, CALLBACKS)
    step = rng.choice(STEP_KINDS)
    return Case(
        seed=seed,
        layers=tuple(rng.choice(list(layers)) for _ in range(rng.randint(2, 5))),
        step=step,
        callbacks=tuple(sorted(rng.sample(callbacks, rng.randint(0, 2)))),
        accumulate=rng.choice((1, 1, 2)) if step != "manual_two_backwards" else 1,
        clip=rng.choice((None, None, 0.5)) if step != "manual_two_backwards" else None,
        optimizer=rng.choice(("AdamW", "SGD")),
        policy=rng.choice(NEWER_POLICIES[: None if is_newer else 5]),
    )


class FuzzModule(pl.LightningModule):
    """A chain of layers between an embedding and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        self.case = case
        self.automatic_optimization = case.step != "manual_two_backwards"
        self.enter = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList([NEWER_LAYERS[name]() for name in case.layers])
        self.head = nn.Linear(WIDTH, 8)
        self.records: dict[str, Any] = {}
        self.metric_total, self.num_steps = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self(x), y)

    def training_step(self, batch: Any, batch_index: int) -> Any:
        return getattr(self, f"_step_{self.case.step}")(*batch)

    def _step_plain(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y)

    def _step_penalty(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(x, y) + 0.01 * sum(p.pow(2).sum() for p in self.parameters() if p.requires_grad)

    def _step_late_penalty(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y)
        if self.global_step >= 2:
            loss = loss + 0.01 * self.enter.weight.abs().sum() + 0.01 * self.head.weight.pow(2).sum()
        return loss

    def _step_input_gradient_penalty(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        loss = self.loss(x, y)
        (gradient,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return loss + 0.1 * gradient.pow(2).mean()

    def _step_adversarial(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(self.loss(x, y), x)
        return self.loss((x + 0.1 * gradient.sign()).detach(), y)

    def _step_manual_two_backwards(self, x: Tensor, y: Tensor) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(x, y))
        self.manual_backward(0.5 * self(x).pow(2).mean())
        optimizer.step()

    def _step_adaptive_weight(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        first, second = nn.functional.mse_loss(out, y), out.abs().mean()
        (a,) = torch.autograd.grad(first, self.head.weight, retain_graph=True)
        (b,) = torch.autograd.grad(second, self.head.weight, retain_graph=True)
        return first + (a.norm() / (b.norm() + 1e-4)).clamp(0, 10).detach() * second

    def _step_metric(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(x, y)
        self.metric_total += loss.item()
        self.num_steps += 1
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_index: int) -> None:
        x, y = batch
        self.records.setdefault("validation", []).append(float(self.loss(x, y)))
        if "score_with_weight" in self.case.callbacks:
            self.records.setdefault("scores", []).append((self.head.weight @ self.enter.weight).sum().item())
        if "gradient_in_validation" in self.case.callbacks:
            with torch.enable_grad():
                x = x.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss(x, y), x)
            self.records.setdefault("input_gradients", []).append(gradient.norm().item())

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        if self.case.optimizer == "SGD":
            return torch.optim.SGD(trainable, lr=0.02, momentum=0.9)
        return torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4)

    def train_dataloader(self) -> Any:
        return _loader(1, BATCH)

    def val_dataloader(self) -> Any:
        return _loader(2, BATCH)


class Centered(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


def average_what_ddp_forgot(parameter: Tensor) -> None:
    """DDP no longer averages the gradient of a parameter that ``register_parametrization`` has touched."""
    if parameter.grad is not None:
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= torch.distributed.get_world_size()


class FuzzCallback(pl.Callback):
    """Reads and writes weights between steps, as its case says."""

    def __init__(self, case: Case) -> None:
        self.kinds = case.callbacks
        self.teacher: nn.Module | None = None
        self.views: list[Tensor] = []
        self.has_changed = False

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        if "kept_views" in self.kinds:
            self.views = [module.head.weight.data, module.enter.weight.T, module.enter.weight.detach()[0]]
        if any(kind.startswith("teacher") for kind in self.kinds):
            torch.manual_seed(5)
            self.teacher = nn.Linear(8, WIDTH)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        records, pairs = module.records, []
        if self.teacher is not None:
            pairs = list(zip(self.teacher.parameters(), module.enter.parameters(), strict=True))
        with torch.no_grad():
            if "teacher_by_data" in self.kinds:
                for theirs, ours in pairs:
                    theirs.data = 0.5 * theirs.data + 0.5 * ours.data
            if "teacher_in_place" in self.kinds:
                for theirs, ours in pairs:
                    theirs.lerp_(ours, 0.5)
            if "scale_weights" in self.kinds:
                module.head.weight.mul_(0.9)
            if "clamp_data" in self.kinds:
                for parameter in module.parameters():
                    parameter.data.clamp_(-0.2, 0.2)
            if "log_weight_norms" in self.kinds:
                records.setdefault("norms", []).append([p.norm().item() for p in module.parameters()])
            if "state_dict" in self.kinds:
                sums = {name: value.double().sum().item() for name, value in module.state_dict().items()}
                records.setdefault("state", []).append([sums[name] for name in sorted(sums)])
            if "reset_a_layer" in self.kinds and trainer.global_step == 2:
                torch.manual_seed(11)
                nn.init.normal_(module.head.weight, std=0.1)
            if "numpy_statistics" in self.kinds:
                records.setdefault("numpy", []).append([float(p.detach().numpy().sum()) for p in module.parameters()])
            if "kept_views" in self.kinds:
                records.setdefault("kept", []).append([float(view.sum()) for view in self.views])
        if trainer.global_step == 2 and not self.has_changed:
            self.has_changed = True
            self.change(module)

    def change(self, module: Any) -> None:
        """What changes the module once, in the middle of training."""
        torch.manual_seed(12)
        if "freeze_a_layer" in self.kinds:
            module.enter.requires_grad_(False)
        if "parametrize_late" in self.kinds:
            nn.utils.parametrize.register_parametrization(module.enter, "weight", Centered())
        if "prune_late" in self.kinds:
            nn.utils.prune.l1_unstructured(module.head, "weight", amount=0.3)
        if "replace_a_layer" in self.kinds:
            module.head = nn.Linear(WIDTH, 8)

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if "parametrize_late" in self.kinds and self.has_changed and isinstance(trainer.strategy, DDPStrategy):
            average_what_ddp_forgot(module.enter.parametrizations.weight.original)
        if "log_gradient_norms" in self.kinds:
            norms = [p.grad.norm().item() for p in module.parameters() if p.grad is not None]
            module.records.setdefault("gradients", []).append(norms)
        if "gradients_by_hand" in self.kinds:
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.3)
            for parameter in module.head.parameters():
                if parameter.grad is not None:
                    parameter.grad = 0.5 * parameter.grad + 0.001 * parameter.detach()


def _loader(seed: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, TIME, 8, generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def random_plan(module: FuzzModule, case: Case, ranks: int) -> ExecutionPlan:
    """Random modes for what is shardable, slices where the operator can be split, random recomputed blocks."""
    rank = torch.distributed.get_rank()
    x, y = _loader(1, ROWS).dataset.tensors  # type: ignore[attr-defined]
    batch = [tensor[rank : rank + ranks * BATCH : ranks] for tensor in (x, y)]  # what the rank's sampler gives first
    return plan_by_policy(module, batch, case.policy, ranks, case.seed, case.accumulate)


def plan_by_policy(
    module: pl.LightningModule, batch: Any, policy: str, ranks: int, seed: int = 0, accumulation: int = 1
) -> ExecutionPlan:
    """What can be sharded has the mode that the policy says, in slices or cut where that is asked for and possible."""
    size, degrees = len(batch[0]), (ranks,) * (policy == "tp")
    with torch.random.fork_rng():
        context = TrialContext(module, batch, size, torch.device("cpu"), tensor_degrees=degrees)
        model = pipeline.profile_model(context).model_profile
    rng, operators, splits = random.Random(seed + 1), [], {}
    for candidate in model.tensor_candidates:
        splits |= {name: candidate.split(i, ranks) for i, name in enumerate(candidate.operators)}
    for index, op in enumerate(model.operators):
        mode, slices, dim = Mode.DP, 1, None
        if op.is_shardable:
            by_policy = {"mixed": list(WEIGHT_MODES)[index % 3], "random": rng.choice(list(WEIGHT_MODES))}
            mode = by_policy.get(policy) or Mode(policy if policy in ("dp", "zdp", "zdp2") else "zdp")
            dims = op.split_dims if policy == "sliced" else ()
            if dims:
                slices, dim = 2, dims[0]
        if op.name in splits:
            mode = Mode.TP
        operators.append(
            OperatorPlan(
                name=op.name,
                slices=(mode,) * slices,
                split_dim=dim,
                tensor=splits.get(op.name),
                num_parameters=op.num_parameters,
            )
        )
    scopes = {each.scope: each.tensor_scope for each in model.tensor_candidates if each.scope is not None}
    plan = plan_with(operators, model, ranks, size, accumulation)
    return plan.model_copy(update={"tensor_scopes": scopes})


@dataclass
class Outcome:
    """How one strategy ended."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    records: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_ours: bool = False
    steps_done: int = 0


def train(case: Case, folder: str, by_osdp: bool) -> Outcome:
    module = FuzzModule(case)
    outcome = Outcome()
    fit: pl.Trainer | None = None
    try:
        random.seed(case.seed)
        strategy: Any = DDPStrategy(find_unused_parameters=True)
        if by_osdp:
            plan = random_plan(FuzzModule(case), case, torch.distributed.get_world_size())
            box = [plan.to_json()]
            torch.distributed.broadcast_object_list(box)  # routes may differ between ranks
            strategy = OSDPStrategy(plan=ExecutionPlan.from_json(box[0]), cache="")
        fit = trainer(
            folder,
            strategy,
            max_steps=STEPS,
            callbacks=[FuzzCallback(case)],
            accumulate_grad_batches=case.accumulate,
            gradient_clip_val=case.clip,
            limit_val_batches=2,
            val_check_interval=2,
            check_val_every_n_epoch=None,
        )
        fit.fit(module)
        with fit.strategy.summon_full_params() if by_osdp else nullcontext():
            outcome.weights = {n: v.detach().clone() for n, v in module.state_dict().items()}
    except Exception as error:
        outcome.error, outcome.is_ours = traceback.format_exc(), isinstance(error, OSDPError)
    outcome.records = module.records
    outcome.steps_done = fit.global_step if fit is not None else 0
    return outcome


def judge(case: Case, plain: Outcome, ours: Outcome) -> str:
    """Return ``equal``, ``refused``, or what went wrong."""
    if plain.error:
        return f"DDP itself failed: {plain.error.splitlines()[-1]}"
    if ours.error:
        last = ours.error.strip().splitlines()[-1]
        if ours.is_ours:
            return f"refused: {last}" if ours.steps_done == 0 else f"LATE after {ours.steps_done} steps: {last}"
        return "RAW: " + " / ".join(ours.error.strip().splitlines()[-1:] + ours.error.strip().splitlines()[-4:-1])
    if plain.weights.keys() != ours.weights.keys():
        return f"WRONG: other keys: {plain.weights.keys() ^ ours.weights.keys()}"
    shapes = [n for n, v in plain.weights.items() if v.shape != ours.weights[n].shape]
    if shapes:
        return f"WRONG: other shapes: {shapes}"
    off = {n: (v.double() - ours.weights[n].double()).abs().max().item() for n, v in plain.weights.items()}
    worst = max(off, key=lambda name: off[name])
    if not off[worst] <= TOLERANCE:
        return f"WRONG: {worst} is off by {off[worst]:.3g}"
    for name, values in plain.records.items():
        expected, got = tree_flatten(values), tree_flatten(ours.records.get(name, []))
        left, right = torch.tensor(expected[0]), torch.tensor(got[0])
        if expected[1] != got[1] or not torch.allclose(left, right, rtol=1e-4, atol=1e-4):
            return f"WRONG: record {name}: {values} by DDP, {ours.records.get(name)} by OSDP"
    return "equal"


def is_fault(verdict: str) -> bool:
    """Return whether a judgement is none of the allowed ones."""
    return not verdict.startswith(("equal", "refused", "DDP itself failed"))


def run_cases(rank: int, world_size: int, seeds: list[int], folder: str, case_timeout_s: float = 300.0) -> list[str]:
    """Return the judgement of each seed on this rank, up to the first fault on any rank; ``folder`` gets them, too.

    A seed that takes longer than ``case_timeout_s`` ends the process.
    """
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    verdicts: list[str] = []
    with open(f"{folder}/stacks-{rank}", "w") as stacks, open(f"{folder}/verdicts-{rank}", "w") as written:
        for seed in seeds:
            faulthandler.dump_traceback_later(case_timeout_s, exit=True, file=stacks)
            case = case_of(seed)
            plain = train(case, folder, by_osdp=False)
            verdicts.append(judge(case, plain, train(case, folder, by_osdp=True)))
            print(json.dumps(verdicts[-1]), file=written, flush=True)
            is_fault_anywhere = torch.tensor(is_fault(verdicts[-1]), dtype=torch.int32)
            torch.distributed.all_reduce(is_fault_anywhere)
            if is_fault_anywhere:
                break
        faulthandler.cancel_dump_traceback_later()
    return verdicts


def read_verdicts(folder: str, rank: int) -> list[str]:
    """Return what ``run_cases`` has written so far."""
    path = Path(folder, f"verdicts-{rank}")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
