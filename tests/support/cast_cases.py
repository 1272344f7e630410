"""Layers and tables that read their weight in ways that a traced step under autocast may not have shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 24, 6
NUM_IDS = 7


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, dtype: torch.dtype, columns: Tensor | None) -> Tensor:
        rounded = rows.to(dtype).to(rows.dtype)
        return rounded if columns is None else torch.where(columns, rounded, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def round_rows(rows: Tensor, dtype: torch.dtype = torch.bfloat16, columns: Tensor | None = None) -> Tensor:
    """What was looked up in float32 as if the table, or these columns of it, had been rounded; its gradient is not."""
    rounded: Tensor = _Rounded.apply(rows, dtype, columns)  # type: ignore[no-untyped-call]
    return rounded


class Layer(nn.Linear):
    """A linear layer that counts its steps."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.step = 0

    @property
    def is_odd(self) -> bool:
        self.step += 1
        return self.step % 2 == 1


class NormInOddSteps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.weight.norm() if self.is_odd else y


class NormBeforeProduct(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.weight.square().mean() if self.is_odd else x)


class AutocastOffInOddSteps(Layer):
    def forward(self, x: Tensor) -> Tensor:
        is_enabled = torch.is_autocast_enabled("cpu") and not self.is_odd
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            return super().forward(x.float()).float()


class Clamped(Layer):
    """Changes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        if self.is_odd:
            self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class ChangedInPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.is_odd:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


class Hooked(Layer):
    """A hook changes its weight before each run, another reads it afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda layer, _: layer.weight.data.mul_(0.99).shape and None)
        self.register_forward_hook(lambda layer, _, y: y + layer.weight.sum())


class Viewed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + torch.einsum("ni,oi->no", x, self.weight)


class ByKeyword(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(bias=self.bias, weight=self.weight, input=x)


class Converted(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.bfloat16(), self.weight.to(torch.bfloat16), self.bias.bfloat16()).float()


class GivenTwice(Layer):
    """Gives its weight twice to a function that is given no casts."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.multi_dot([x.float(), self.weight, self.weight])


class Cell(nn.GRUCell):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Frozen(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)


class Twice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.t(), x.float().t() @ gradient.float()


class _Keeping(_Saving):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x.float() @ weight.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient.float() @ ctx.weight.t(), ctx.x.float().t() @ gradient.float()


class _Unread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.float() + 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), weight + gradient.sum()


class SavedUnread(Layer):
    """Saves its weight for the backward, though the forward does not read it so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + _Unread.apply(x, self.weight)


class SavedByFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return _Saving.apply(x, self.weight)


class KeptByFunction(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return _Keeping.apply(x, self.weight)


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Saved(Layer):
    """Looks at its own state."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.state_dict()["weight"].mean() + torch.as_tensor(self.weight).sum().detach()


class OnOneRank(Layer):
    """The second rank alone reads the weight as it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * self.weight.norm() if dist.get_rank() == 1 and not self.is_odd else y


class Asking(Layer):
    """Asks what it may without reading values."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        assert weight.shape == (WIDTH, WIDTH) == weight.size()
        assert weight.dtype == torch.float32
        assert weight.requires_grad
        assert weight.is_leaf
        assert isinstance(weight, nn.Parameter)
        assert weight in set(self.parameters())
        assert len(weight) == WIDTH
        return super().forward(x.to(weight.dtype))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        NormInOddSteps,
        NormBeforeProduct,
        AutocastOffInOddSteps,
        Clamped,
        ChangedInPlace,
        Hooked,
        Viewed,
        ByKeyword,
        Converted,
        GivenTwice,
        Cell,
        Frozen,
        Twice,
        SavedUnread,
        SavedByFunction,
        KeptByFunction,
        Checkpointed,
        Saved,
        OnOneRank,
        Asking,
    )
}


class Table(nn.Embedding):
    """Adds rows; ``rounds`` for what gathered casts must give, where the table itself is gathered."""

    rounds = False

    def __init__(self, **options: Any) -> None:
        super().__init__(NUM_IDS, WIDTH, **options)
        self.step = 0

    @property
    def is_odd(self) -> bool:
        self.step += 1
        return self.step % 2 == 1

    def look_up(self, x: Tensor, *, is_exact: bool = False, **options: Any) -> Tensor:
        rows = functional.embedding(ids_of(x), self.weight, **options)
        assert rows.dtype == torch.float32
        is_rounded = self.rounds and not is_exact and torch.is_autocast_enabled("cpu")
        return round_rows(rows) if is_rounded else rows

    def forward(self, x: Tensor) -> Tensor:
        return x + self.look_up(x)


def ids_of(x: Tensor) -> Tensor:
    return (x.detach().float().abs().sum(-1) * 5).long() % NUM_IDS


class ScaledTable(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.look_up(x, padding_idx=-5, scale_grad_by_freq=True)


class TwiceLookedUp(Table):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.look_up(x)
        return y * self.look_up(y)


class TableOfProduct(Table):
    """The product reads a cast, as it does without sharding."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.look_up(x)
        return y + functional.linear(y, self.weight) @ self.weight


class TableAfterNorm(Table):
    """The run goes on with the values that it has by then."""

    def forward(self, x: Tensor) -> Tensor:
        is_odd = self.is_odd
        y = x * self.weight.norm() if is_odd else x
        return y + self.look_up(y, is_exact=is_odd and torch.is_autocast_enabled("cpu"))


class TableBeforeNorm(Table):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.look_up(x)
        return y * self.weight.norm() if self.is_odd else y


class IndexedTable(Table):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight[ids_of(x)] if self.is_odd else self.look_up(x))


class TableInFloat32(Table):
    def forward(self, x: Tensor) -> Tensor:
        is_enabled = torch.is_autocast_enabled("cpu") and not self.is_odd
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            return x + self.look_up(x)


class LimitedTable(Table):
    """Changes its rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.look_up(x, is_exact=True, max_norm=0.5)


class FrozenTable(Table):
    def __init__(self) -> None:
        super().__init__()
        self.weight.requires_grad_(False)


class CheckpointedTable(Table):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class TableOnOneRank(Table):
    """The second rank alone reads the table as it is."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.look_up(x)
        return y * self.weight.norm() if dist.get_rank() == 1 and not self.is_odd else y


TABLES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        ScaledTable,
        TwiceLookedUp,
        TableOfProduct,
        TableAfterNorm,
        TableBeforeNorm,
        IndexedTable,
        TableInFloat32,
        LimitedTable,
        FrozenTable,
        CheckpointedTable,
        TableOnOneRank,
    )
}


class Odd(nn.Module):
    """Such a layer or table between two ordinary layers."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        made = (LAYERS | TABLES)[layer]()
        self.first, self.odd, self.last = nn.Linear(WIDTH, WIDTH), made, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.odd(torch.tanh(self.first(x)))))
