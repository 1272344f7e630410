"""What users do to modules while they train, seen through the engine on two ranks."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.fsdp import is_fsdp_managed_module

from lightning_osdp.backend import memory
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from tests.support.local_shards import local_shard
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
UNITS = 300
Loss = Callable[[nn.Module, Tensor, int, int], Tensor]


def reference(model: nn.Module, loss: Loss, data: Tensor, lr: float = 0.1) -> dict[str, Tensor]:
    """Final weights of plain training in one process; the loss is the mean over what each rank would see."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        torch.stack([loss(model, batch[rank::2], step, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
    return model.state_dict()


def train_with_engine(
    rank: int, model: nn.Module, modes: dict[str, Mode], loss: Loss, data: Tensor, lr: float = 0.1
) -> dict[str, Any]:
    """The same through the engine; rank 0 gets the state."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    engine = FairScaleEngine(CPU)
    engine.apply(model, hand_made_plan(modes, 2), [optimizer])
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        engine.before_forward()
        loss(model, batch[rank::2], step, rank).backward()
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        with torch.no_grad():  # evaluation in between must not leave stale weights behind
            loss(model, batch, step, rank)
    return engine.model_state()


class Twice(nn.Module):
    """A layer that runs twice, one that is frozen, and one that only some steps or ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen, self.rare, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        x = self.shared(self.frozen(torch.tanh(self.shared(x))))
        return self.out(x + self.rare(x) if rare else x)


def rare_loss(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    """``rare`` is used by both ranks, by rank 1 alone, or by none."""
    return model(x, rare=(step % 3 == 0) or (step % 3 == 1 and rank == 1)).square().mean()


def encoder_loss(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x.view(x.shape[0], 2, 8)).square().mean()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def lstm_loss(model: nn.Module, x: Tensor, step: int, rank: int) -> Tensor:
    return model(x.view(x.shape[0], 4, 4))[0].square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Mode]]] = {
    "run twice, frozen, rarely used": (
        Twice,
        rare_loss,
        {"shared": Mode.ZDP2, "frozen": Mode.ZDP, "out": Mode.ZDP, "rare": Mode.DP},
    ),
    "frozen and kept": (Twice, rare_loss, {"shared": Mode.ZDP2, "frozen": Mode.ZDP2, "out": Mode.ZDP2}),
    "transformer encoder": (
        encoder,
        encoder_loss,
        {f"layers.{i}.{n}": Mode.ZDP for i in range(2) for n in ("self_attn", "linear1", "linear2")},
    ),
    "lstm": (lambda: nn.LSTM(4, 8, 2, batch_first=True).requires_grad_(), lstm_loss, {}),
}


class Wrapped(nn.Module):
    """Gives a single module a name, so that it can be an operator."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def build_case(name: str) -> tuple[nn.Module, Loss, dict[str, Mode]]:
    build, loss, modes = MODELS[name]
    torch.manual_seed(3)
    model = build()
    return (Wrapped(model), loss, {"inner": Mode.ZDP}) if not modes else (model, loss, modes)


def data() -> Tensor:
    return torch.randn(7, 4, 16, generator=torch.Generator().manual_seed(5))


def run_models(rank: int, ranks: int) -> dict[str, Any]:
    return {name: train_with_engine(rank, *_engine_arguments(build_case(name)), data()) for name in MODELS}


def _engine_arguments(made: tuple[nn.Module, Loss, dict[str, Mode]]) -> tuple[nn.Module, dict[str, Mode], Loss]:
    model, loss, modes = made
    return model, modes, loss


def save_and_load(rank: int, ranks: int) -> Any:
    """Trains 3 steps under one plan, moves model and optimizer state to another plan, and trains 3 more."""
    steps = gpt_batches(6, 8)
    torch.manual_seed(1)
    model = TinyGPT()
    optimizer = two_groups(model)
    engine = FairScaleEngine(CPU)
    engine.apply(model, hand_made_plan(modes_for(model, "mixed"), ranks), [optimizer])
    gpt_steps(engine, model, optimizer, steps[:3], rank, ranks)
    box = [(engine.model_state(), engine.optimizer_state(optimizer))]
    torch.distributed.broadcast_object_list(box, 0)
    saved = copy.deepcopy(box[0])  # torch optimizers go on with the very tensors that they load
    model2 = TinyGPT()
    optimizer2 = two_groups(model2)
    engine2 = FairScaleEngine(CPU)
    engine2.apply(model2, hand_made_plan(modes_for(model2, "zdp"), ranks), [optimizer2])
    engine2.load_model_state(box[0][0])
    engine2.load_optimizer_state(optimizer2, box[0][1])
    gpt_steps(engine2, model2, optimizer2, steps[3:], rank, ranks)
    broken = dict(box[0][0])
    broken["head.weight"] = broken["head.weight"][:3]
    before = engine2.model_state()
    with pytest.raises(ShardingError, match=r"head\.weight is \(3, 32\) there and \(61, 32\) here"):
        engine2.load_model_state(broken)
    with pytest.raises(ShardingError, match=r"missing keys \['embed\.weight'\]"):
        engine2.load_model_state({k: v for k, v in broken.items() if k != "embed.weight"})
    after = engine2.model_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return saved, engine2.model_state()


def gpt_steps(engine: Any, model: nn.Module, optimizer: Any, steps: Tensor, rank: int, ranks: int) -> None:
    for batch in steps:
        optimizer.zero_grad()
        gpt_loss(model, batch[rank::ranks]).backward()
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()


def grad_norms(rank: int, ranks: int) -> list[float]:
    """Gradient norms of several orders, clipped to nothing."""
    torch.manual_seed(1)
    model = TinyGPT()
    engine = FairScaleEngine(CPU)
    whole = [p.shape for p in model.parameters()]
    engine.apply(model, hand_made_plan(modes_for(model, "mixed"), ranks))
    assert [p.shape for p in model.parameters()] == whole  # what a model summary counts
    parts = [local_shard(p).shape for p in model.parameters()]
    with engine.unsharded_shapes():
        assert [local_shard(p).shape for p in model.parameters()] == whole
    assert [local_shard(p).shape for p in model.parameters()] == parts != whole
    gpt_loss(model, gpt_batches(1, 8)[0][rank::ranks]).backward()
    engine.finish_backward()
    return [float(engine.clip_grad_norm(model.parameters(), 1e9, order)) for order in (1.0, 2.0, float("inf"))]


def check_refusals(rank: int, ranks: int) -> None:
    """Plans that can't be applied, and a parameter that comes too late."""
    engine = FairScaleEngine(CPU)
    model = TinyGPT()
    with pytest.raises(ShardingError, match=r"'blocks\.9\.up', which is not a submodule"):
        engine.check(model, hand_made_plan({"blocks.9.up": Mode.ZDP}, ranks))
    model.head.weight = model.embed.weight
    with pytest.raises(ShardingError, match="share a parameter"):
        engine.check(model, hand_made_plan({"embed": Mode.ZDP, "head": Mode.ZDP}, ranks))
    with pytest.raises(ShardingError, match=r"embed can't be sharded: its parameter is also head\.weight"):
        engine.check(model, hand_made_plan({"embed": Mode.ZDP}, ranks))
    with pytest.raises(ShardingError, match="float64"):
        engine.check(TinyGPT().double(), hand_made_plan({"head": Mode.ZDP}, ranks))
    model = TinyGPT()
    engine.apply(model, hand_made_plan({"head": Mode.ZDP}, ranks))
    sparse, other = Wrapped(nn.Embedding(8, 4, sparse=True)), FairScaleEngine(CPU)
    other.apply(sparse, hand_made_plan({}, ranks))
    with pytest.raises(ShardingError, match="sparse gradients are not supported"):
        sparse(torch.tensor([1, 2])).sum().backward()
    late = nn.Parameter(torch.zeros(3))
    with pytest.raises(ShardingError, match="in no unit and in no bucket"):
        engine.before_optimizer_step(torch.optim.SGD([*model.parameters(), late], lr=0.1))


def keeps_own_values(rank: int, ranks: int) -> list[bool]:
    """Whether this rank's values are there still, with and without rank 0's being sent to all."""
    found = []
    for broadcast in (True, False):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(64, 64))
        before = model[0].weight.detach().clone()
        engine = FairScaleEngine(torch.device("cpu"), broadcast=broadcast)
        engine.apply(model, hand_made_plan({"0": Mode.DP, "1": Mode.ZDP}, ranks))
        found.append(torch.equal(model[0].weight, before))
    return found


def count_broadcast_bytes(rank: int, ranks: int) -> list[int]:
    """What rank 0 sends of its values: where all have the same, where others differ in one, and in all of them."""
    found = []
    for seed, changed in ((0, 0), (0, rank), (rank, 0)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False).bfloat16())
        with torch.no_grad():
            model[1].weight[-1, -1] += changed
        engine = FairScaleEngine(CPU)
        with patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as broadcast:
            engine.apply(model, hand_made_plan({"0": Mode.DP, "1": Mode.ZDP}, ranks))
        with engine.summon_full_params():
            values = [parameter.detach().float().sum() for parameter in model.parameters()]
        everyone: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(everyone, values)
        assert everyone == [values] * ranks
        found.append(sum(call.args[0].nbytes for call in broadcast.call_args_list))
    return found


class Writer(TinyGPT):
    """Has what transformers' models write texts with."""

    def generate(self, tokens: Tensor) -> Tensor:
        return self(tokens).argmax(-1)


def attributes_of(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def restore_module(rank: int, ranks: int) -> dict[str, Any]:
    """Attributes by when they were there; whether transformers' ``generate`` waits for all ranks, sharded and whole."""
    model, engine = Writer(), FairScaleEngine(CPU)
    attributes = {"before": attributes_of(model)}
    engine.apply(model, hand_made_plan(modes_for(model, "mixed"), ranks))
    attributes["sharded"], waits = attributes_of(model), [is_fsdp_managed_module(model)]
    with pytest.raises(ShardingError, match="which is not a submodule"):
        engine.apply_plan_change(hand_made_plan({"none": Mode.ZDP}, ranks), [])
    attributes["after a refusal"] = attributes_of(model)
    engine.restore([])
    attributes["restored"] = attributes_of(model)
    return attributes | {"waits": [*waits, is_fsdp_managed_module(model)]}


def measure_units(rank: int, ranks: int) -> dict[str, Any]:
    """Resident bytes that each of many tiny units takes after two steps; whether a closed engine is freed."""
    found: dict[str, Any] = {}
    for count in (5, UNITS):  # the first ones load code
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count)))
        memory.trim(CPU)
        before = memory.memory_in_use(CPU)
        engine = FairScaleEngine(CPU)
        engine.apply(model, hand_made_plan({str(index): Mode.ZDP for index in range(count)}, ranks))
        for _ in range(2):
            engine.before_forward()
            model(torch.ones(2, 8)).sum().backward()
            engine.finish_backward()
            engine.after_optimizer_step()
        memory.trim(CPU)
        found["bytes"] = (memory.memory_in_use(CPU) - before) / count
        engine.close()
        freed, deadline = weakref.ref(engine), time.monotonic() + 10
        del engine, model
        while freed() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)  # a thread may be answering for it just now
        found["is_freed"] = freed() is None
    return found


def run_all(rank: int, ranks: int) -> dict[str, Any]:
    """All of the above in the same processes, since starting them takes longest."""
    units = measure_units(rank, ranks)  # first, before there is freed memory to use again
    results = {"models": run_models(rank, ranks), "saved": save_and_load(rank, ranks), "norms": grad_norms(rank, ranks)}
    results |= {"units": units, "sent": count_broadcast_bytes(rank, ranks), "restored": restore_module(rank, ranks)}
    check_refusals(rank, ranks)
    return results


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What rank 0 returned."""
    return run_ranks(run_all, 2)[0]


def test_memory_of_a_unit_is_what_plans_count(results: dict[str, Any]) -> None:
    counted = memory.KEPT_BYTES["cpu"]["unit_bytes"] + memory.KEPT_BYTES["cpu"]["tensor_bytes"]  # a gradient
    assert counted / 4 < results["units"]["bytes"] < 2 * counted  # with holes of a heap that is not trimmed


def test_closed_engine_is_freed_with_its_module(results: dict[str, Any]) -> None:
    assert results["units"]["is_freed"]


@pytest.mark.parametrize("name", list(MODELS))
def test_engine_trains_like_plain_pytorch(results: dict[str, Any], name: str) -> None:
    model, loss, _ = build_case(name)
    expected = reference(model, loss, data())
    state = results["models"][name]
    assert list(state) == list(expected)
    for key, weight in expected.items():
        torch.testing.assert_close(state[key], weight, rtol=1e-5, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}")


def test_state_loads_into_other_plan_and_plain_pytorch(results: dict[str, Any]) -> None:
    (model_state, optimizer_state), final = results["saved"]
    model = TinyGPT()
    optimizer = two_groups(model)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    for batch in gpt_batches(6, 8)[3:]:
        optimizer.zero_grad()
        gpt_loss(model, batch).backward()
        optimizer.step()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(final[name], weight, rtol=1e-5, atol=1e-6)


def test_engine_broadcasts_rank_zero_values_unless_disabled() -> None:
    assert run_ranks(keeps_own_values, 2) == [[True, True], [False, True]]


def test_engine_broadcasts_only_values_that_differ_between_ranks(results: dict[str, Any]) -> None:
    assert results["sent"] == [0, 2 * 512 * 256, 4 * 256 * 256 + 2 * 512 * 256]


def test_restored_module_has_no_attribute_of_the_engine_and_generates_on_one_rank_alone(
    results: dict[str, Any],
) -> None:
    found = results["restored"]
    assert found["restored"] == found["before"]
    assert found["waits"] == [True, False]


def test_change_to_plan_that_cannot_be_applied_leaves_attributes_of_sharded_module(results: dict[str, Any]) -> None:
    found = results["restored"]
    assert found["after a refusal"] == found["sharded"] != found["before"]


def test_clip_grad_norm_counts_each_element_once(results: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = TinyGPT()
    gpt_loss(model, gpt_batches(1, 8)[0]).backward()
    expected = [
        float(nn.utils.get_total_norm([p.grad for p in model.parameters()], n)) for n in (1.0, 2.0, float("inf"))
    ]
    assert results["norms"] == pytest.approx(expected, rel=1e-5)
