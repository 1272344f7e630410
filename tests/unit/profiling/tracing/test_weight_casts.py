"""Which weights a step under autocast reads as casts alone, proven by the trace; and where casts are counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_osdp.planning.cost.footprint import footprint
from lightning_osdp.planning.cost.memory_timeline import Timeline
from lightning_osdp.planning.spec.choices import WEIGHT_MODES, Mode, ShardingChoice
from lightning_osdp.planning.spec.model import ModelProfile, Operator, ParameterInfo
from tests.support.models import some_cluster
from tests.support.traced_models import trace

WIDTH, ROWS = 160, 8
WEIGHT = 4 * WIDTH * WIDTH
CPU = torch.device("cpu")


class Net(LightningModule):
    """A linear layer with what comes before the layer ``x`` that is looked at."""

    def __init__(self, x: nn.Module, read: Callable[[nn.Module, Tensor], Tensor] = lambda x, rows: x(rows)) -> None:
        super().__init__()
        self.first, self.x, self.read = nn.Linear(WIDTH, WIDTH), x, read

    def training_step(self, batch: Tensor) -> Tensor:
        return self.read(self.x, self.first(batch)).float().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def profile_of(module: LightningModule, dtype: torch.dtype | None = torch.bfloat16) -> ModelProfile:
    context = (
        partial(torch.autocast, "cpu", dtype) if dtype is not None else partial(torch.autocast, "cpu", None, False)
    )
    return trace(module, torch.randn(ROWS, WIDTH), ROWS, device=CPU, step_context=context).model_profile


def operator_of(
    x: nn.Module, read: Callable[[nn.Module, Tensor], Tensor] | None = None, dtype: torch.dtype | None = torch.bfloat16
) -> Operator:
    module = Net(x, read) if read is not None else Net(x)
    return next(op for op in profile_of(module, dtype).operators if any(is_large_of_x(p) for p in op.parameters))


def is_large_of_x(parameter: ParameterInfo) -> bool:
    return parameter.name.startswith("x.") and not parameter.is_small


class InFloat32(nn.Linear):
    """Switches autocast off."""

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return functional.linear(rows.float(), self.weight, self.bias)


class Transposed(nn.Linear):
    """Multiplies with a view."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.t() + self.bias


class Normed(nn.Linear):
    """Reads its weight twice, once as it is."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) * self.weight.norm()


class Scaled(nn.Module):
    """A matrix that scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS * WIDTH * 16))

    def forward(self, rows: Tensor) -> Tensor:
        return rows.float() * self.weight[:WIDTH]


class TwoWeights(nn.Module):
    """One is read as a cast, the other as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.one) + self.other.sum()


class Looked(nn.Module):
    """Looks rows up."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding, **options: Any) -> None:
        super().__init__()
        self.table = kind(ROWS * 16, WIDTH, **options)

    def forward(self, rows: Tensor) -> Tensor:
        ids = torch.zeros(len(rows), dtype=torch.long)
        return rows + self.table(ids[:, None] if isinstance(self.table, nn.EmbeddingBag) else ids)


class LookedUpByKeyword(Looked):
    """Looks rows up without its module."""

    def forward(self, rows: Tensor) -> Tensor:
        ids = torch.zeros(len(rows), dtype=torch.long)
        return rows + functional.embedding(weight=self.table.weight, input=ids)


class LookedInFloat32(Looked):
    """Looks rows up where autocast is off."""

    def forward(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(rows)


class Indexed(nn.Embedding):
    """Looks rows up by an index."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Tied(nn.Module):
    """Looks rows up in the weight of a product."""

    def __init__(self, head: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.product = nn.Embedding(ROWS * 16, WIDTH), nn.Linear(WIDTH, ROWS * 16, bias=False)
        self.product.weight = self.table.weight
        self.head = head

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self, rows + self.table(torch.zeros(len(rows), dtype=torch.long)))


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, rows: Tensor) -> Tensor:
        x = rows[None]
        return self.inner(x, x, x, need_weights=False)[0][0]


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def test_products_under_autocast_read_casts_alone() -> None:
    cell = nn.GRUCell(WIDTH, WIDTH)
    for made in (nn.Linear(WIDTH, WIDTH), frozen(nn.Linear(WIDTH, WIDTH)), Attention(), cell):
        assert operator_of(made).compute_dtype == "bfloat16", made
    assert operator_of(nn.Linear(WIDTH, WIDTH), dtype=torch.float16).compute_dtype == "float16"
    conv = operator_of(nn.Conv1d(4, 4 * WIDTH, 7), lambda x, rows: x(rows[:, None].expand(-1, 4, -1)))
    assert conv.compute_dtype == "bfloat16"
    assert [p.cast_element_bytes for p in conv.parameters if not p.is_small] == [2]


def test_product_in_a_checkpoint_of_the_models_own_reads_casts() -> None:
    made = operator_of(nn.Linear(WIDTH, WIDTH), lambda x, rows: checkpoint(x, rows, use_reentrant=False))
    assert made.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("made", "read"),
    [
        (InFloat32(WIDTH, WIDTH), None),
        (Transposed(WIDTH, WIDTH), None),
        (Normed(WIDTH, WIDTH), None),
        (TwoWeights(), None),
        (LookedInFloat32(), None),
        (Looked(Indexed), None),
        (Looked(nn.EmbeddingBag), None),
        (Looked(max_norm=1.0), None),
        (Looked(), lambda x, rows: x(rows) + x.table.weight.square().sum()),
        (nn.LSTM(WIDTH, WIDTH), lambda x, rows: x(rows[None])[0]),
        (nn.Linear(WIDTH, WIDTH), lambda x, rows: x(rows) + x.weight.square().sum()),
        (nn.Linear(WIDTH, WIDTH), lambda x, rows: functional.linear(rows, x.weight.to(torch.bfloat16))),
        (nn.Linear(WIDTH, WIDTH), lambda x, rows: rows + x.weight.bfloat16().sum()),
    ],
    ids=[
        *("autocast off", "view", "norm", "two weights", "rows with autocast off", "index", "bag", "limited rows"),
        *("table read outside", "lstm", "read outside", "cast by hand", "cast by hand and summed"),
    ],
)
def test_weight_that_is_read_as_it_is_anywhere_stays_so(made: nn.Module, read: Any) -> None:
    operator = operator_of(made, read)
    assert operator.compute_dtype == ""
    assert {p.cast_element_bytes for p in operator.parameters} == {0}
    assert {p.looked_up for p in operator.parameters} == {""}


@pytest.mark.parametrize(
    ("made", "dtype"),
    [(Looked(padding_idx=0), torch.bfloat16), (LookedUpByKeyword(), torch.bfloat16), (Looked(), torch.float16)],
    ids=["padded", "by keyword", "float16"],
)
def test_table_is_gathered_in_the_type_of_autocast_and_has_no_cast_if_replicated(
    made: nn.Module, dtype: torch.dtype
) -> None:
    operator = operator_of(made, dtype=dtype)
    (table,) = operator.parameters
    assert operator.compute_dtype == str(dtype).removeprefix("torch.")
    assert (table.cast_element_bytes, table.looked_up, table.read_in_backward) == (2, "alone", False)
    made = {mode: footprint(operator, ShardingChoice((mode,)), some_cluster(2)) for mode in WEIGHT_MODES}
    half = table.parameter_bytes / 2
    assert {mode: each.unsharded_between_passes for mode, each in made.items()} == {"dp": 0, "zdp2": half, "zdp": 0}
    assert {mode: each.gathered_in_total for mode, each in made.items()} == {"dp": 0, "zdp2": half, "zdp": half}
    assert {mode: each.replicated_casts for mode, each in made.items()} == dict.fromkeys(WEIGHT_MODES, 0)


def test_without_autocast_nothing_is_a_cast() -> None:
    operator = operator_of(nn.Linear(WIDTH, WIDTH), dtype=None)
    assert operator.compute_dtype == ""
    assert operator_of(Scaled()).compute_dtype == ""


def test_backward_reads_products_and_no_embedding() -> None:
    assert operator_of(nn.Linear(WIDTH, WIDTH)).parameters[0].read_in_backward
    assert operator_of(nn.Linear(WIDTH, WIDTH), dtype=None).parameters[0].read_in_backward
    for dtype in (torch.bfloat16, None):
        assert not operator_of(Looked(), dtype=dtype).parameters[0].read_in_backward


@pytest.mark.parametrize(
    ("head", "cast_bytes", "dtype"),
    [
        (lambda tied, rows: tied.product(rows), 2, torch.bfloat16),
        (lambda tied, rows: tied.product(rows), 0, None),
        (lambda tied, rows: checkpoint(tied.product, rows, use_reentrant=False), 2, torch.bfloat16),
        (lambda tied, rows: tied.product(rows) * tied.table.weight.square().mean(), 0, torch.bfloat16),
    ],
    ids=["autocast", "float32", "checkpoint", "read as it is"],
)
def test_backward_reads_a_table_that_is_tied_to_a_product_or_its_cast(
    head: Any, cast_bytes: int, dtype: torch.dtype | None
) -> None:
    (table,) = (p for p in operator_of(Tied(head), dtype=dtype).parameters if not p.is_small)
    assert table.aliases
    assert (table.cast_element_bytes, table.read_in_backward) == (cast_bytes, True)
    assert table.looked_up == ("beside products" if cast_bytes else "")  # autocast keeps a cast of a replicated one


def test_backward_reads_no_table_of_which_autograd_has_a_cast_of_its_own() -> None:
    """Something else of the operator is read as it is, so that nothing of it is gathered as a cast."""
    tied = Tied(lambda tied, rows: tied.product(rows) * tied.other.sum())
    tied.other = nn.Parameter(torch.ones(ROWS, WIDTH))
    operator = operator_of(tied)
    reads = {p.name.rpartition(".")[2]: (p.cast_element_bytes, p.read_in_backward) for p in operator.parameters}
    assert operator.compute_dtype == ""
    assert reads["weight"] == (0, False)


def test_casts_count_where_the_plan_keeps_them() -> None:
    """Of two products the casts of both are there at the start of the backward if replicated, of neither in zdp."""
    module = Net(nn.Linear(WIDTH, WIDTH))
    under_autocast, plain = profile_of(module), profile_of(module, None)
    cluster = some_cluster(2)

    def peaks(model: ModelProfile, mode: Mode) -> dict[str, float]:
        choices = [ShardingChoice((mode,))] * len(model.operators)
        curves = Timeline(model, cluster, 0).curves(choices, ROWS)
        backward = next(i for i, moment in enumerate(model.moments) if moment.phase == "backward")
        return {name: float(curve[backward]) for name, curve in curves.items()}

    activations = {mode: peaks(under_autocast, mode)["activations"] for mode in Mode}
    assert len(set(activations.values())) == 1
    assert activations[Mode.DP] < peaks(plain, Mode.DP)["activations"] + 8 * ROWS * WIDTH
    assert peaks(under_autocast, Mode.DP)["gathered"] == WEIGHT  # two casts of half the size
    assert peaks(under_autocast, Mode.ZDP2)["gathered"] == WEIGHT
    assert peaks(under_autocast, Mode.ZDP)["gathered"] <= WEIGHT / 2  # of the one that runs
    assert peaks(plain, Mode.ZDP2)["gathered"] == 2 * WEIGHT
