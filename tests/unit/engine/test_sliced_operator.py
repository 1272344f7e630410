"""One operator, split: the same values and gradients as whole, in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.model import SMALL_PARAMETER_ELEMENTS
from tests.support.local_shards import local_shard
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_plan
from tests.unit.engine.fairscale.test_engine import Wrapped

CPU = torch.device("cpu")
IN, OUT = 12, 20


@pytest.fixture(autouse=True, scope="module")
def single_rank() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()


def rows() -> Tensor:
    return torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(1), requires_grad=True)


def ids() -> Tensor:
    return torch.tensor([[1, 2, 2, 0], [5, 1, 7, 0]])


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "linear, input": (lambda: nn.Linear(IN, OUT), rows, 1),
    "linear, output": (lambda: nn.Linear(IN, OUT), rows, 0),
    "linear without bias, input": (lambda: nn.Linear(IN, OUT, bias=False), rows, 1),
    "linear without bias, output": (lambda: nn.Linear(IN, OUT, bias=False), rows, 0),
    "large bias, output": (lambda: nn.Linear(IN, SMALL_PARAMETER_ELEMENTS), rows, 0),
    "large bias, input": (lambda: nn.Linear(IN, SMALL_PARAMETER_ELEMENTS), rows, 1),
    "conv1d, input": (lambda: Conv1D(OUT, IN), rows, 0),
    "conv1d, output": (lambda: Conv1D(OUT, IN), rows, 1),
    "embedding": (lambda: nn.Embedding(9, OUT), ids, 1),
    "embedding, padding and frequency": (lambda: nn.Embedding(9, OUT, padding_idx=0, scale_grad_by_freq=True), ids, 1),
}


def apply_split(inner: nn.Module, modes: tuple[Mode, ...], dim: int) -> tuple[FairScaleEngine, nn.Module]:
    engine, model = FairScaleEngine(CPU), Wrapped(copy.deepcopy(inner))
    engine.apply(model, split_plan({"inner": (modes, dim)}, 1))
    return engine, model


def mixed_modes(k: int) -> tuple[Mode, ...]:
    return tuple(list(Mode)[(i + 2) % 3] for i in range(k))


def unsharded_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name."""
    return {name: parameter.grad.clone() for name, parameter in model.inner.named_parameters()}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("k", [2, 3, 8])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_sliced_operator_matches_unsliced_values_and_gradients(kind: str, k: int, autocast: bool) -> None:
    torch.manual_seed(0)
    build, make_input, dim = KINDS[kind]
    whole = build()
    engine, model = apply_split(whole, mixed_modes(k), dim)
    x, x2 = make_input(), make_input()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, output = whole(x), model(x2)
    assert output.dtype == expected.dtype
    assert output.shape == expected.shape
    long_sums = 2 if expected.shape[-1] == SMALL_PARAMETER_ELEMENTS else 1
    tolerance = {"rtol": 0.03, "atol": 0.03} if autocast else {"rtol": 1e-6, "atol": 2e-6 * long_sums}
    torch.testing.assert_close(output, expected, **tolerance)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) / expected.shape[-1] ** 0.5
    expected.backward(weight.to(expected.dtype))
    output.backward(weight.to(expected.dtype))
    engine.finish_backward()
    if x.requires_grad:
        torch.testing.assert_close(x2.grad, x.grad, **tolerance)
    ours = unsharded_gradients(model)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(ours[name].view(parameter.shape), parameter.grad, **tolerance)


def test_sliced_table_is_looked_up_with_its_options_of_now() -> None:
    torch.manual_seed(0)
    whole = nn.Embedding(9, OUT)
    engine, model = apply_split(whole, mixed_modes(3), 1)
    for table in (whole, model.inner):
        table.padding_idx, table.scale_grad_by_freq = 2, True
    whole(ids()).sum().backward()
    model(ids()).sum().backward()
    engine.finish_backward()
    torch.testing.assert_close(unsharded_gradients(model)["weight"].view(9, OUT), whole.weight.grad)
    for name, value, message in (("max_norm", 1.0, "max_norm changes whole rows"), ("sparse", True, "are sparse")):
        _, model = apply_split(nn.Embedding(9, OUT), mixed_modes(3), 1)
        setattr(model.inner, name, value)
        with pytest.raises(ShardingError, match=f"split into slices, but .*{message}.* not so when the plan was made"):
            model(ids())


class AddedTypes(TorchDispatchMode):
    """Notes the types of what is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            self.found.append([tensor.dtype for tensor in args[:2]])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [kind for kind, (build, _, _) in KINDS.items() if hasattr(build(), "bias")])
def test_bias_is_added_in_the_type_of_autocast(kind: str) -> None:
    """Of two types, torch would copy the whole result into fp32 and back."""
    build, make_input, dim = KINDS[kind]
    _, model = apply_split(build(), (Mode.ZDP,) * 2, dim)
    with torch.autocast("cpu", torch.bfloat16), AddedTypes() as added:
        model(make_input())
    assert added.found == ([[torch.bfloat16] * 2] if model.inner.bias is not None else [])


@pytest.mark.parametrize("dim", [0, 1])
def test_sliced_operator_with_other_input_dtype_raises_like_unsliced(dim: int) -> None:
    whole = nn.Linear(IN, OUT)
    _, model = apply_split(whole, mixed_modes(4), dim)
    for module in (whole, model):
        with pytest.raises(RuntimeError, match="dtype"):
            module(rows().double())


def test_sliced_operator_accepts_one_dimensional_and_empty_inputs() -> None:
    whole = nn.Linear(IN, OUT)
    for dim in (0, 1):
        _, model = apply_split(whole, mixed_modes(4), dim)
        for x in (torch.randn(IN), torch.randn(0, IN)):
            torch.testing.assert_close(model(input=x), whole(x))


class LargestOutput(TorchDispatchMode):
    """The most elements that any operation's result allocates."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.numel = max(self.numel, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@pytest.mark.parametrize(("kind", "dim"), [("linear", 1), ("linear", 0), ("embedding", 1), ("conv1d", 0)])
def test_sliced_operator_allocates_no_more_than_one_slice(kind: str, dim: int) -> None:
    build = {
        "linear": lambda: nn.Linear(256, 256, bias=False),
        "conv1d": lambda: Conv1D(256, 256),
        "embedding": lambda: nn.Embedding(256, 256),
    }
    engine, model = apply_split(build[kind](), (Mode.ZDP,) * 4, dim)
    # Storage of one slice, as it would be gathered: on a single rank slices are views of the user's whole weight.
    for part in engine._sliced_operators[0]._slices:
        part.weight.data = part.weight.data.clone()
        part.weight.__dict__.pop("_fp32_shard", None)
    x = torch.arange(3) if kind == "embedding" else torch.randn(3, 256, requires_grad=True)
    with LargestOutput() as largest:
        model(x).sum().backward()
    assert 0 < largest.numel <= 256 * 256 // 4


def test_sliced_operator_keeps_module_interface_and_summons_full_params() -> None:
    layer = nn.Linear(IN, OUT)
    engine, model = apply_split(layer, mixed_modes(3), 1)
    weight = model.inner.weight
    assert isinstance(model.inner, nn.Linear)
    assert (model.inner.in_features, model.inner.out_features) == (IN, OUT)
    assert repr(model.inner) == repr(layer)
    assert list(model.inner.state_dict()) == ["weight", "bias"]
    assert [name for name, _ in model.named_parameters()] == ["inner.weight", "inner.bias"]
    assert weight.shape == (OUT, IN)
    assert local_shard(weight).shape == (IN * OUT,)
    with engine.summon_full_params():
        torch.testing.assert_close(model.inner.weight, layer.weight)
        with pytest.raises(ShardingError, match="can't run while its parameters are shown whole"):
            model(rows())
        with pytest.raises(ShardingError, match="within itself"), engine.summon_full_params():
            pass
        nn.init.ones_(model.inner.weight)
    assert model.inner.weight is weight
    x = rows()
    torch.testing.assert_close(model(x), x.sum(-1, keepdim=True) + layer.bias)
    with engine.summon_full_params(writeback=False):
        nn.init.zeros_(model.inner.weight)
    assert model.inner.weight.detach().eq(1).all()


def test_sliced_operator_accumulates_gradients_on_full_parameter() -> None:
    """Frees, zeroes and accumulates them in the orders that training loops do, also between forward and backward."""
    torch.manual_seed(0)
    whole = nn.Linear(IN, OUT)
    engine, model = apply_split(whole, mixed_modes(4), 1)
    ours, theirs = model.inner.weight, whole.weight

    def run(zero: Callable[[nn.Module], Any], scale: float) -> None:
        for module in (whole, model):
            loss = (scale * module(rows())).square().mean()
            zero(module)
            loss.backward()
        engine.finish_backward()
        engine.finish_backward()
        torch.testing.assert_close(unsharded_gradients(model)["weight"], theirs.grad, rtol=1e-5, atol=1e-6)
        assert all(
            part.weight.grad is None for part in engine._sliced_operators[0]._slices
        )  # the handle's is the only one

    run(lambda m: m.zero_grad(set_to_none=True), 1.0)
    run(lambda m: None, 2.0)
    flat = ours.grad
    run(lambda m: m.zero_grad(set_to_none=False), 3.0)
    assert ours.grad is flat
    run(lambda m: m.zero_grad(set_to_none=True), 4.0)
    assert ours.grad is not flat
    ours.requires_grad_(False)
    theirs.requires_grad_(False)
    ours.grad = theirs.grad = None
    engine.before_forward()
    model(rows()).sum().backward()
    engine.finish_backward()
    assert ours.grad is None
    for weight in (ours, theirs):
        weight.requires_grad_(True)
    engine.before_forward()
    run(lambda m: None, 1.0)


def test_sliced_operator_state_round_trips_with_plain_module() -> None:
    """Model and optimizer state go to the plain module and back, an update reaches every slice."""
    torch.manual_seed(0)
    whole = Wrapped(nn.Linear(IN, OUT))
    plain = torch.optim.AdamW(whole.parameters(), lr=0.1)
    engine, model = apply_split(whole.inner, mixed_modes(5), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        for module, update in ((whole, plain), (model, optimizer)):
            update.zero_grad()
            module(rows()).square().mean().backward()
            if module is model:
                engine.before_optimizer_step(optimizer)
            update.step()
        engine.after_optimizer_step()
    torch.testing.assert_close(engine.model_state(), dict(whole.state_dict()))
    state = engine.optimizer_state(optimizer)
    for index, entries in plain.state_dict()["state"].items():
        torch.testing.assert_close(state["state"][index], entries)
    engine.load_model_state({name: torch.full_like(w, 2.0) for name, w in whole.state_dict().items()})
    engine.load_optimizer_state(optimizer, copy.deepcopy(plain.state_dict()))
    torch.testing.assert_close(engine.optimizer_state(optimizer)["state"][0], plain.state_dict()["state"][0])
    x = rows()
    torch.testing.assert_close(model(x), 2 * x.sum(-1, keepdim=True).expand(3, 5, OUT) + 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(8)


@pytest.mark.parametrize(
    ("module", "splits", "recomputed", "message"),
    [
        (Wrapped(nn.LayerNorm(64)), {"inner": (mixed_modes(2), 0)}, (), r"inner can't be split .* neither a Linear"),
        (
            Wrapped(nn.Linear(8, 8)),
            {"inner": (mixed_modes(2), 2)},
            (),
            r"dimension 2 of its weight: it can be along 1 or 0",
        ),
        (
            Wrapped(nn.Embedding(8, 8)),
            {"inner": (mixed_modes(2), 0)},
            (),
            r"dimension 0 of its weight: it can be along 1",
        ),
        (Wrapped(nn.Linear(3, 8)), {"inner": (mixed_modes(4), 1)}, (), r"into 4 slices: dimension 1 .* has 3 elements"),
        (Tied(), {"embed": (mixed_modes(2), 1)}, (), r"embed can't be sharded: its parameter is also head\.weight"),
        (Tied(), {}, ("block",), r"recomputes 'block', which is not a submodule"),
        (nn.Sequential(nn.ModuleList([nn.Linear(2, 2)])), {}, ("0",), r"recomputes 0, a ModuleList, which is never"),
        (Wrapped(Tied()), {}, ("inner.head", "inner"), r"recomputes inner\.head twice: by itself and with inner"),
    ],
)
def test_apply_of_invalid_split_raises_before_moving_parameters(
    module: nn.Module, splits: Any, recomputed: tuple[str, ...], message: str
) -> None:
    before = {name: (p.data_ptr(), p.shape) for name, p in module.named_parameters()}
    with pytest.raises(ShardingError, match=message):
        FairScaleEngine(CPU).apply(module, split_plan(splits, 1, recomputed))
    assert {name: (p.data_ptr(), p.shape) for name, p in module.named_parameters()} == before


class Twice(nn.Module):
    """A split layer that runs twice and is frozen at first, and one that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.rare, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.shared.weight.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = self.shared(torch.tanh(self.shared(x)))
        return self.out(x + self.rare(x) if rare else x)


TWICE = {
    "shared": ((Mode.ZDP2, Mode.DP, Mode.ZDP2), 1),
    "rare": ((Mode.ZDP, Mode.DP), 0),
    "out": ((Mode.DP, Mode.ZDP, Mode.ZDP2, Mode.ZDP), 1),
}


def data() -> Tensor:
    return torch.randn(8, 2, 2, 16, generator=torch.Generator().manual_seed(5))  # (steps, micro-batches, samples, in)


def train_twice(rank: int, ranks: int) -> Any:
    """Accumulates without ``no_sync`` as manual optimization does, with gradients zeroed between forward and backward,
    and moves to a plan without splits, and on to another with, in the middle."""
    torch.manual_seed(3)
    model = Twice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    engine = FairScaleEngine(CPU)
    engine.apply(model, split_plan(TWICE, ranks), [optimizer])
    for step, batches in enumerate(data()):
        if step in (3, 6):
            box = [(engine.model_state(), engine.optimizer_state(optimizer))]
            dist.broadcast_object_list(box, 0)
            model = Twice()
            model.shared.weight.requires_grad_(step == 6)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
            engine = FairScaleEngine(CPU)
            plain = dict.fromkeys(TWICE, ((Mode.ZDP2,), None))
            engine.apply(model, split_plan(plain if step == 3 else TWICE, ranks), [optimizer])
            engine.load_model_state(box[0][0])
            engine.load_optimizer_state(optimizer, box[0][1])
        if step == 5:
            model.shared.weight.requires_grad_(True)
        for i, batch in enumerate(batches):
            engine.before_forward()
            loss = model(batch[rank::ranks], rare=step % 2 == 0).square().mean()
            if i == 0:
                optimizer.zero_grad()
            with pytest.raises(ShardingError, match="between forward and backward"), engine.summon_full_params():
                pass  # those of zdp2 are whole already
            loss.backward()
            engine.finish_backward()
        engine.clip_grad_norm(model.parameters(), 0.1, norm_type=3.0)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
    with engine.summon_full_params(model.out):
        shapes = [local_shard(p).dim() for p in model.parameters()]
        seen = model.out.weight.detach().clone()
        model.out.weight.data.mul_(2)
    return engine.model_state(), engine.optimizer_state(optimizer), shapes, seen


def test_sliced_operators_in_manual_training_loop_match_plain_training() -> None:
    ours, optimizer_state, shapes, seen = run_ranks(train_twice, 2)[0]
    torch.manual_seed(3)
    model = Twice()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step, batches in enumerate(data()):
        if step == 5:
            model.shared.weight.requires_grad_(True)
        optimizer.zero_grad()
        for batch in batches:
            model(batch, rare=step % 2 == 0).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3.0)
        optimizer.step()
    assert shapes == [1, 1, 1, 1, 2, 1]  # weights and biases; only the last weight was asked for
    torch.testing.assert_close(seen, model.out.weight.detach(), rtol=1e-4, atol=1e-5)
    model.out.weight.data.mul_(2)
    torch.testing.assert_close(ours, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    for index, entries in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(optimizer_state["state"][index], entries, rtol=1e-4, atol=1e-5)


def unsharded_bytes_at_gradients(rank: int, ranks: int, embedding: bool) -> list[int]:
    """What is whole of each slice when its gradient has just been made."""
    model = Wrapped(nn.Embedding(16, 24) if embedding else nn.Linear(24, 16))
    engine = FairScaleEngine(CPU)
    engine.apply(model, split_plan({"inner": ((Mode.ZDP, Mode.ZDP2, Mode.ZDP), 1)}, ranks))
    found: list[int] = []
    for unit in engine._units:
        (weight,) = unit.params
        weight.register_post_accumulate_grad_hook(
            lambda p: found.append(p._full_param_padded.untyped_storage().size())  # type: ignore[attr-defined]
        )
    x = torch.arange(8) if embedding else torch.randn(4, 24, requires_grad=True)
    model(x).sum().backward()
    engine.finish_backward()
    return found


@pytest.mark.parametrize("embedding", [False, True], ids=["linear", "embedding"])
def test_slice_is_resharded_before_its_gradient_is_made(embedding: bool) -> None:
    assert run_ranks(unsharded_bytes_at_gradients, 2, embedding) == [[0, 0, 0]] * 2
