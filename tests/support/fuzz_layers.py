"""Layers that have broken sharded training somewhere, all of shape (batch, time, WIDTH) to the same, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24


def linear(out_features: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out_features)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.fc(x))


class InPlaceActivation(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu_(self.fc(x))


class InPlaceAdd(Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y += x
        y.mul_(0.5)
        return torch.tanh(y)


class InPlaceOnChunks(Plain):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc(x).split(WIDTH // 2, dim=-1)
        return x + torch.cat([torch.tanh(first), second * 2], dim=-1)


class WeightNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.utils.weight_norm(self.fc)


class SpectralNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.utils.spectral_norm(self.fc)


class ParametrizedNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.utils.parametrizations.weight_norm(self.fc)


def _scale_by_weight(module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0] / (1 + module.weight.norm()),)


class PreHookReadsWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_forward_pre_hook(_scale_by_weight)


def _add_weight_mean(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + module.weight.mean()


class PostHookReadsWeight(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_forward_hook(_add_weight_mean)


class _WithWeight(nn.Module):
    """Has a weight of its own, of ``rows`` rows."""

    rows = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.rows, WIDTH) / WIDTH)


class _WithInner(nn.Module):
    """Runs one ``inner`` module, and makes a tensor of its result."""

    inner_class: Callable[[], nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.inner_class()


@dataclass
class Result:
    value: Tensor
    note: str


class _DataclassOut(_WithWeight):
    def forward(self, x: Tensor) -> Any:
        return Result(F.linear(x, self.weight), "odd")


class DataclassResult(_WithInner):
    inner_class = _DataclassOut

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x).value)


class _DistributionOut(_WithWeight):
    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(F.linear(x, self.weight), torch.ones(()))


class DistributionResult(_WithInner):
    inner_class = _DistributionOut

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x).mean)


class _RouterOut(_WithWeight):
    def __init__(self) -> None:
        super().__init__()
        self.handed_on: Any = None

    def forward(self, x: Tensor) -> None:
        self.handed_on = [F.linear(x, self.weight)]


class AttributeResult(_WithInner):
    inner_class = _RouterOut

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        (handed_on,) = self.inner.handed_on
        self.inner.handed_on = None
        return x + torch.tanh(handed_on)


class SharedCoin(nn.Module):
    """Takes one of two branches, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(), linear()
        self.coin = random.Random(7)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh((self.left if self.coin.random() < 0.5 else self.right)(x))


class SkippedByRank(Plain):
    """Leaves its layer out by a coin that differs between ranks, from the third forward pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.coin: random.Random | None = None
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.coin is None:
            self.coin = random.Random(dist.get_rank() if dist.is_initialized() else 0)
        self.passes += 1
        if self.passes > 2 and self.training and self.coin.random() < 0.5:
            return x
        return x + torch.tanh(self.fc(x))


class CalledTwice(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(torch.tanh(self.fc(x))))


class ReadsOthersWeight(Plain):
    """Its second use of the weight passes by the layer that holds it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(F.linear(self.fc(x), self.fc.weight.T))


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = linear(), linear()
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(torch.tanh(self.down(x))))


class FrozenLayer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc.requires_grad_(False)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(linear(), nn.Tanh(), linear())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.net, x, use_reentrant=False)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.conv(x.transpose(1, 2)).transpose(1, 2))


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Without bias: behind the norm it has no gradient but rounding noise, which Adam blows up.
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.fc(x).transpose(1, 2)).transpose(1, 2))


class _Several(_WithWeight):
    rows = 2 * WIDTH

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = F.linear(x, self.weight).chunk(2, dim=-1)
        return {"input": x, "nested": (first, "text", None), "unused": second, "again": first}


class SeveralOutputs(_WithInner):
    """One of its outputs is not used, one is an input, one comes twice."""

    inner_class = _Several

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return out["input"] + torch.tanh(out["nested"][0]) + 0.1 * out["again"]


class Experts(nn.Module):
    """Routes each row to one of three experts by its values: a rank's rows may leave an expert out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([linear() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        route = (x.detach().sum((1, 2)) * 10).long() % 3
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (route == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + torch.tanh(out)


class _KeepsViews(_WithWeight):
    """Keeps views of its weight from the third pass on, and reads those of the pass before."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        scale = sum(view.detach().abs().mean() for view in self.kept)
        self.passes += 1
        if self.passes > 2:
            self.kept = [self.weight[2:], self.weight.t(), self.weight.data[0]]
        return F.linear(x, self.weight) * (1 + 0.1 * scale)


class KeptViews(_WithInner):
    inner_class = _KeepsViews

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class ViewsFromTheStart(Plain):
    """Holds views of its weight that were taken when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.passes = self.fc.weight.detach()[:, 1], 0
        self.views = [self.fc.weight[:3]]

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        y = torch.tanh(self.fc(x)) * (1 + 0.1 * self.row.abs().mean())
        return x + (y if self.passes <= 2 else y + 0.1 * self.views[0].sum(0))


def _add_mean_by_numpy(module: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    module.statistics = module.weight.detach().numpy()
    return output + float(module.statistics.mean())


class NumpyInHook(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.fc.register_forward_hook(_add_mean_by_numpy)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    cls.__name__: cls
    for cls in (
        Plain,
        InPlaceActivation,
        InPlaceAdd,
        InPlaceOnChunks,
        WeightNorm,
        SpectralNorm,
        ParametrizedNorm,
        PreHookReadsWeight,
        PostHookReadsWeight,
        DataclassResult,
        DistributionResult,
        AttributeResult,
        SharedCoin,
        SkippedByRank,
        CalledTwice,
        ReadsOthersWeight,
        TiedWeights,
        FrozenLayer,
        Attention,
        Recomputed,
        Convolution,
        Normalized,
        SeveralOutputs,
        Experts,
    )
}

NEWER_LAYERS = LAYERS | {cls.__name__: cls for cls in (KeptViews, ViewsFromTheStart, NumpyInHook)}
