"""Modules, each with something odd that a callback, a hook or a step does, trained by DDP and under plans by hand."""

from __future__ import annotations

import copy
import traceback
import types
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy
from lightning_osdp.errors import OSDPError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from lightning_osdp.planning.spec.tensor import TensorScope
from tests.support.fuzz import plan_by_policy
from tests.support.lightning_contract import is_fake
from tests.support.modules import trainer

WIDTH, HIDDEN, CLASSES, BATCH, STEPS = 8, 12, 5, 4, 5


class Odd(pl.LightningModule):
    """An MLP, a table and a head, with nothing odd."""

    has_validation = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter, self.mid = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.table, self.head = nn.Embedding(CLASSES, HIDDEN), nn.Linear(HIDDEN, CLASSES, bias=False)
        self.noted: list[Tensor] = []
        self.build()

    def build(self) -> None:
        """Add what is odd."""

    def note(self, value: Any) -> None:
        self.noted.append(torch.as_tensor(value).detach().double().clone())

    def is_live(self, x: Tensor) -> bool:
        """Whether this is a real step of a run: planning does not see what comes late."""
        return self._trainer is not None and not is_fake(x)

    def body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mid(torch.tanh(self.enter(x))))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), y) + 0.1 * self.table(y).square().mean()

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        return self.loss(*batch)

    def validation_step(self, batch: Any, batch_index: int) -> None:
        self.note(self.loss(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(64, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, torch.randint(0, CLASSES, (64,), generator=generator)), batch_size=BATCH)

    val_dataloader = train_dataloader


class SumsOverSteps(Odd):
    """Zeroes gradients in every second step alone."""

    def optimizer_zero_grad(self, epoch: int, batch_index: int, optimizer: Any) -> None:
        if batch_index % 2 == 0:
            optimizer.zero_grad()


class OptimizerReplaced(Odd):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index == 1:
            self.trainer.strategy.optimizers = [torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-3)]


class GradientsSeen(Odd):
    """A hook on several gradients."""

    def on_train_start(self) -> None:
        parameters = [self.mid.weight, self.head.weight]
        self.__dict__["handle"] = torch.autograd.graph.register_multi_grad_hook(parameters, self.see)

    def see(self, gradients: Any) -> None:
        self.note(torch.stack([gradient.norm() for gradient in gradients]))


class GradientAtEdge(Odd):
    """The gradient at an edge of autograd's graph, which stands for a parameter."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        edge = torch.autograd.graph.get_gradient_edge(self.head.weight)
        self.note(torch.autograd.grad(self.loss(*batch), [edge])[0])


class WritesInGradientHook(Odd):
    def on_train_start(self) -> None:
        for parameter in (self.table.weight, self.mid.weight):
            parameter.register_post_accumulate_grad_hook(decay)  # type: ignore[no-untyped-call]


def decay(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9)


class StepsInBackward(Odd):
    """As in torch's tutorial on stepping in the backward pass, which DDP's averages come too late for."""

    def on_train_start(self) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())  # type: ignore[no-untyped-call]


class ComplexProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.complex64) / HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class TwoTypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.eye(HIDDEN)), nn.Parameter(torch.eye(HIDDEN, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.one + x @ self.other.float()


class OtherTypes(Odd):
    """Operators of types that units don't hold."""

    def build(self) -> None:
        self.wide, self.turned = nn.Linear(HIDDEN, HIDDEN).double(), ComplexProduct()
        self.both = TwoTypes()

    def body(self, x: Tensor) -> Tensor:
        return self.wide(self.both(self.turned(super().body(x))).double()).float()


class LastTied(Odd):
    """A weight that is used inside and outside of a recomputed part."""

    def build(self) -> None:
        self.inner, self.outer = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.outer.weight = self.inner.weight

    def body(self, x: Tensor) -> Tensor:
        h: Tensor = checkpoint(lambda h: torch.tanh(self.inner(h)), super().body(x), use_reentrant=False)
        return torch.tanh(self.outer(h))


class PaddedEncoder(Odd):
    """Validated with a mask of padded positions, in whose place torch's fast path returns what nothing computes."""

    has_validation = True

    def build(self) -> None:
        layer = nn.TransformerEncoderLayer(HIDDEN, 2, 16, 0.0, batch_first=True)
        self.plain = nn.TransformerEncoder(layer, 1)
        self.normed = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(HIDDEN))

    def body(self, x: Tensor) -> Tensor:
        h = super().body(x)[:, None] * torch.linspace(0.5, 1.5, 3)[:, None]
        padded = torch.stack([torch.zeros_like(x[:, 0]), x[:, 0], x[:, 0]], 1) > 0
        unordered = torch.stack([x[:, 0], x[:, 1], torch.zeros_like(x[:, 0])], 1) > 0
        h = self.normed(self.plain(h, src_key_padding_mask=padded).square(), src_key_padding_mask=padded).square()
        return self.plain(h, src_key_padding_mask=unordered).mean(1)  # type: ignore[no-any-return]


class FrozenByRank(Odd):
    """Ranks freeze and thaw parameters in turn, replicated ones among them."""

    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        self.mid.requires_grad_((batch_index + self.global_rank) % 2 == 0)
        self.enter.bias.requires_grad_(batch_index != 2)


class SwitchedByRank(Odd):
    """Each rank runs another one of three operators, which lead to the same one."""

    def build(self) -> None:
        self.kinds = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(3)])

    def body(self, x: Tensor) -> Tensor:
        h, chosen = super().body(x), list(self.kinds)
        if self.is_live(x):
            chosen = [chosen[(self.global_step + self.global_rank) % 3]]
        return sum(torch.tanh(kind(h)) for kind in chosen)  # type: ignore[return-value]


class FeaturesInValidation(Odd):
    """Validation collects what is between the operators of an MLP, and a hook runs them in part."""

    has_validation = True

    def validation_step(self, batch: Any, batch_index: int) -> None:
        h = torch.tanh(self.enter(batch[0]))
        self.note(h)
        self.note(self.mid(h))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        self.note(self.enter(batch[0]))


class FeaturesLate(Odd):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = self.loss(*batch)
        return loss + torch.tanh(self.enter(batch[0])).norm() if self.is_live(loss) and batch_index > 1 else loss


class BiasHooks(Odd):
    def build(self) -> None:
        self.mid.bias.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))

    def on_train_start(self) -> None:
        self.enter.bias.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))


class WeightHookLate(Odd):
    def on_train_start(self) -> None:
        self.mid.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


class WeightsGradientLate(Odd):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        loss = self.loss(*batch)
        if self.is_live(loss) and batch_index > 1:
            (gradient,) = torch.autograd.grad(loss, self.mid.weight, retain_graph=True)
            loss = loss * (1 + gradient.norm().detach())
        return loss


class SecondOrderLate(Odd):
    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x, y = batch
        loss = self.loss(x, y)
        if self.is_live(x) and batch_index > 1:
            x = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self.head(self.body(x)).square().sum(), x, create_graph=True)
            loss = loss + 0.1 * gradient.square().mean()
        return loss


class CurvatureLate(Odd):
    """A second derivative to which other terms contribute."""

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        x, y = batch
        loss = self.loss(x, y)
        if self.is_live(x) and batch_index > 1:
            x = x.clone().requires_grad_()
            energy = x.pow(3).sum() + self.head(self.body(x)).square().sum()
            (first,) = torch.autograd.grad(energy, x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            self.note(second)
        return loss


class WritesInPreHook(Odd):
    def on_train_batch_start(self, batch: Any, batch_index: int) -> None:
        if batch_index == 2:
            self.mid.register_forward_pre_hook(lambda module, _: decay(module.weight))


class ReplacedForward(Odd):
    """The forward of an operator is replaced in training, by one that reads its weight."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            return functional.linear(x, 0.5 * module.weight, module.bias)

        if batch_index == 1:
            self.mid.forward = types.MethodType(forward, self.mid)  # type: ignore[method-assign]


class ReplacedByCopy(Odd):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_index: int) -> None:
        if batch_index == 1:
            self.mid = copy.deepcopy(self.mid)


CHANGES_LATE = "weight of mid is sharded, and it "
CASES: dict[tuple[Callable[[], Odd], str], str] = {
    **{(kind, policy): "equal" for policy in ("zdp", "mixed") for kind in (
        SumsOverSteps, OptimizerReplaced, GradientsSeen, GradientAtEdge, WritesInGradientHook, OtherTypes,
        PaddedEncoder,
    )},
    **{(FrozenByRank, policy): "equal" for policy in ("zdp", "mixed", "sliced", "tp")},
    **{(kind, "tp"): "equal" for kind in (
        SumsOverSteps, OptimizerReplaced, OtherTypes, LastTied, SwitchedByRank, FeaturesInValidation, BiasHooks,
        ReplacedForward, ReplacedByCopy, PaddedEncoder,
    )},
    (StepsInBackward, "zdp"): "SGD.step() runs within a backward pass, where its gradient is that of one rank",
    (GradientsSeen, "sliced"): "autograd knows a slice of it, not the parameter itself",
    (GradientsSeen, "tp"): "autograd knows a slice of it, not the parameter itself",
    (FeaturesLate, "tp"): "norm sees what is between the operators of mid, where each rank has a slice",
    (WeightHookLate, "tp"): f"{CHANGES_LATE}is tensor parallel, so that hooks of it would see other ranks' samples",
    (WeightsGradientLate, "tp"): f"{CHANGES_LATE}is tensor parallel: autograd knows a slice, for all ranks' samples",
    (SecondOrderLate, "tp"): "a gradient is differentiated again through operators that are tensor parallel",
    (CurvatureLate, "tp"): "a gradient is differentiated again through operators that are tensor parallel",
    (WritesInPreHook, "tp"): f"{CHANGES_LATE}was changed after what runs together with it had begun, by a hook of it",
}  # fmt: skip
"""What is to come of each kind under each policy: DDP's values, or an error with these words."""


def fit(kind: Callable[[], Odd], policy: str, folder: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the weights and what was noted."""
    module = kind()
    strategy: Any = DDPStrategy(find_unused_parameters=True)
    if policy:
        rank, (x, y) = torch.distributed.get_rank(), module.train_dataloader().dataset.tensors
        rows = [x[rank : 2 * BATCH : 2], y[rank : 2 * BATCH : 2]]
        plan = plan_by_policy(kind(), rows, policy.removesuffix(" by hand"), 2)
        if policy.endswith("by hand"):  # it does not say what is between operators
            plan = plan.model_copy(update={"tensor_scopes": {name: TensorScope() for name in plan.tensor_scopes}})
        box = [plan.to_json()]
        torch.distributed.broadcast_object_list(box)
        strategy = OSDPStrategy(plan=ExecutionPlan.from_json(box[0]), cache="")
    validation = {"limit_val_batches": 2, "val_check_interval": 2, "check_val_every_n_epoch": None}
    trainer(folder, strategy, max_steps=STEPS, **(validation if module.has_validation else {})).fit(module)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.noted


def judge_all(
    rank: int, ranks: int, folder: str, cases: dict[tuple[Callable[[], Odd], str], str]
) -> dict[tuple[Any, str], str]:
    """Return what has come of each case on this rank, in words."""
    warnings.simplefilter("ignore")
    plain: dict[Any, Any] = {}
    found: dict[tuple[Any, str], str] = {}
    for (kind, policy), expected in cases.items():
        if kind not in plain and expected == "equal":
            plain[kind] = fit(kind, "", folder)
        try:
            weights, noted = fit(kind, policy, folder)
        except OSDPError as error:
            found[kind, policy] = f"{type(error).__name__}: {error}"
        except Exception:
            found[kind, policy] = traceback.format_exc()
        else:
            found[kind, policy] = compare(plain[kind], weights, noted) if kind in plain else "no error"
    return found


def compare(plain: tuple[dict[str, Tensor], list[Tensor]], weights: dict[str, Tensor], noted: list[Tensor]) -> str:
    off = [name for name, value in plain[0].items() if not torch.allclose(weights[name], value, rtol=1e-4, atol=1e-5)]
    if off or len(noted) != len(plain[1]):
        return f"weights {off} differ, {len(plain[1])} and {len(noted)} values were noted"
    same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(plain[1], noted, strict=True))
    return "equal" if same else f"noted {noted}, not {plain[1]}"
