"""Gathers in autocast's type: training to the same bits as with gathers of whole parameters, at half the bytes.

But for tables: there the bits are those of training with rows that are rounded after they are looked up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_osdp.backend.hierarchical import FlatCommunicator
from lightning_osdp.engine.fairscale import unit_collectives
from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.planning.spec.choices import Mode, slice_sizes
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.parity.test_tied_parameters import Model
from tests.support.cast_cases import LAYERS, ROWS, TABLES, WIDTH, Odd, Table, round_rows
from tests.support.models import TinyGPT, gpt_batches, gpt_loss, hand_made_plan, modes_for, two_groups, wrap_blocks
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_all, split_plan

STEPS, BATCH, RANKS = 3, 8, 2
POLICIES = ("zdp", "zdp2", "mixed", "joined zdp", "joined zdp2", "sliced", "recomputed", "recomputed joined", "updated")
CPU = torch.device("cpu")


def with_casts(plan: ExecutionPlan, model: nn.Module, dtype: str = "bfloat16") -> ExecutionPlan:
    """The same, in which products and tables are gathered as casts, and no backward reads a table."""

    def types_of(module: nn.Module) -> dict[str, Any]:
        is_product = isinstance(module, nn.Linear | nn.RNNCellBase)
        is_read = is_product or isinstance(module, nn.Embedding)
        return {"compute_dtype": dtype if is_read else "", "gathers_in_backward": is_product}

    operators = tuple(op.model_copy(update=types_of(model.get_submodule(op.name))) for op in plan.operators)
    return plan.model_copy(update={"operators": operators})


def round_sharded_rows(plan: ExecutionPlan, dtype: torch.dtype, model: nn.Module) -> None:
    """Have ``embed`` of a model round those columns of its rows that the plan shards."""
    name, embed = next((n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding))
    slices = next((op.slices for op in plan.operators if op.name == name), (Mode.ZDP,))
    sizes = slice_sizes(embed.embedding_dim, len(slices))
    columns = torch.cat([torch.full((n,), mode != Mode.DP) for n, mode in zip(sizes, slices, strict=True)])
    embed.register_forward_hook(lambda *call: round_rows(call[-1], dtype, columns))


def plan_of(model: nn.Module, policy: str, is_prefetched: bool) -> ExecutionPlan:
    if policy == "sliced":
        plan = split_plan(split_all(model, 3), RANKS)
    else:
        mode = policy.split()[-1] if policy.split()[-1] in tuple(Mode) or policy == "mixed" else "zdp"
        blocks = ("blocks.0", "blocks.1") if "joined" in policy else ()
        plan = wrap_blocks(hand_made_plan(modes_for(model, mode), RANKS), blocks)
    cluster = plan.cluster.model_copy(update={"prefetch_max_bytes": (1 << 30) * is_prefetched})
    again = ("blocks.0", "blocks.1") if "recomputed" in policy else ()
    changes = {"cluster": cluster, "recomputed": again, "update_in_backward": policy == "updated"}
    return plan.model_copy(update=changes)


@contextmanager
def counting_gathers() -> Iterator[list[int]]:
    """Bytes of each gathered unit, as they are asked for."""
    sizes: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            outputs = args[1] if isinstance(args[0], FlatCommunicator) else args[0]
            sizes.append(sum(output.nbytes for output in outputs))
            return function(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatCommunicator, "all_gather_coalesced", counted(FlatCommunicator.all_gather_coalesced))
        patch.setattr(unit_collectives, "all_gather_async", counted(unit_collectives.all_gather_async))
        yield sizes


def train_one(
    rank: int,
    plan: ExecutionPlan,
    accumulation: int,
    dtype: torch.dtype,
    build: Callable[[], nn.Module] = TinyGPT,
    is_rounded: bool = False,
) -> Any:
    """(losses, final weights and optimizer states, bytes gathered); ``is_rounded``: of rounded rows."""
    torch.manual_seed(1)
    model = build()
    optimizer = two_groups(model)
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan, [optimizer])
    if is_rounded:
        round_sharded_rows(plan, dtype, model)
    losses = []
    with counting_gathers() as sizes:
        for batch in gpt_batches(STEPS, BATCH):
            parts = batch[rank::RANKS].chunk(accumulation)
            for index, part in enumerate(parts):
                engine.before_forward()
                with nullcontext() if index + 1 == len(parts) else engine.no_sync():
                    with torch.autocast("cpu", dtype):
                        loss = gpt_loss(model, part) / accumulation
                    loss.backward()
                    engine.finish_backward()
                losses.append(float(loss.detach()))
            engine.before_optimizer_step(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            engine.after_optimizer_step()
    state = engine.model_state(), engine.optimizer_state(optimizer)
    dtypes = {p.dtype for p in model.parameters()}
    engine.restore([optimizer])
    return losses, state, sum(sizes), dtypes


def cases() -> list[tuple[str, bool, int]]:
    prefetched = [(policy, is_prefetched, 1) for policy in POLICIES for is_prefetched in (False, True)]
    return [*prefetched, ("zdp", False, 2), ("zdp2", True, 2)]


def train(rank: int, ranks: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for policy, is_prefetched, accumulation in cases():
        plan = plan_of(TinyGPT(), policy, is_prefetched)
        dtype = torch.float16 if policy == "zdp2" else torch.bfloat16
        name = "float16" if policy == "zdp2" else "bfloat16"
        found[policy, is_prefetched, accumulation] = [
            train_one(rank, plan, accumulation, dtype, is_rounded=True),
            train_one(rank, with_casts(plan, TinyGPT(), name), accumulation, dtype),
        ]
    return found


def train_plain(rank: int) -> dict[str, Any]:
    """Final weights of a module without an engine, whose gradients are averaged, by mode of what it is compared to."""
    found = {}
    for mode, dtype in (("zdp", torch.bfloat16), ("zdp2", torch.float16)):
        torch.manual_seed(1)
        model = TinyGPT()
        round_sharded_rows(plan_of(model, mode, is_prefetched=False), dtype, model)
        optimizer = two_groups(model)
        for batch in gpt_batches(STEPS, BATCH):
            with torch.autocast("cpu", dtype):
                loss = gpt_loss(model, batch[rank::RANKS])
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
            optimizer.step()
            optimizer.zero_grad()
        found[mode] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return found


def tied(rank: int) -> dict[str, Any]:
    """One weight at both ends, in the unit of the model: gathered again for the backward, and not."""
    found = {}
    for mode in ("zdp", "zdp2"):
        modes = {n: m for n, m in modes_for(Model(), mode).items() if n not in ("net.embed", "net.head")}
        plan = with_casts(hand_made_plan({"net": Mode(mode), **modes}, RANKS), Model())
        again = [op.model_copy(update={"gathers_in_backward": True}) for op in plan.operators]
        cast = [op.model_copy(update={"compute_dtype": "bfloat16"}) for op in again]
        plans = plan, *(plan.model_copy(update={"operators": tuple(each)}) for each in (again, cast))
        found[mode] = [train_one(rank, each, 1, torch.bfloat16, Model) for each in plans]
        found[mode].append(train_one(rank, plan, 1, torch.bfloat16, Model, is_rounded=True))
    return found


def run_odd(rank: int, layer: str, mode: str, has_casts: bool) -> Any:
    """(losses and outputs in evaluation, final state): in both passes, and in each way to evaluate."""
    torch.manual_seed(1)
    model = Odd(layer)
    if isinstance(model.odd, Table):
        model.odd.rounds = not has_casts
    plan = hand_made_plan(modes_for(model, mode) | {"odd": Mode(mode)}, RANKS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine = FairScaleEngine(CPU)
    engine.apply(model, with_casts(plan, model) if has_casts else plan, [optimizer])
    x = torch.randn(4, RANKS, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    found = []
    for step in range(4):
        engine.before_forward()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x[step, rank]).float().square().mean()
        loss.backward()
        engine.finish_backward()
        engine.clip_grad_norm(model.parameters(), 0.5)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        engine.after_optimizer_step()
        found.append(loss.detach())
        for context in (torch.no_grad(), torch.inference_mode()):
            with context, torch.autocast("cpu", torch.bfloat16, enabled=step < 2), engine.evaluation_step("a step"):
                found.append(model(x[step, rank]).float().sum().clone())
    state = engine.model_state()
    with engine.summon_full_params():
        summoned = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.restore([optimizer])
    return [float(each) for each in found], state, summoned


def odd(rank: int, ranks: int) -> dict[Any, Any]:
    return {
        (layer, mode): [run_odd(rank, layer, mode, has_casts) for has_casts in (False, True)]
        for layer in LAYERS | TABLES
        for mode in ("zdp", "zdp2")
    }


def losses_of(rank: int, way: str) -> list[float]:
    """Losses of 50 steps: in float32, under autocast with gathered casts, and as ``fully_shard`` trains in bf16."""
    torch.manual_seed(1)
    model = TinyGPT()
    engine, dtype = FairScaleEngine(CPU), torch.bfloat16
    if way == "fully_shard":
        mesh = init_device_mesh("cpu", (RANKS,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
    optimizer = two_groups(model, lr=3e-3)
    if way != "fully_shard":
        plan = plan_of(model, "mixed", is_prefetched=False)
        reduce_dtype = "bfloat16" if way == "reduced in bf16" else ""
        plan = with_casts(plan, model).model_copy(update={"reduce_dtype": reduce_dtype})
        engine.apply(model, plan, [optimizer])
    losses, batches = [], gpt_batches(5, BATCH)
    for step in range(50):
        if way != "fully_shard":
            engine.before_forward()
        with torch.autocast("cpu", dtype, enabled="autocast" in way or "reduced" in way):
            loss = gpt_loss(model, batches[step % 5, rank::RANKS])
        loss.backward()
        if way != "fully_shard":
            engine.finish_backward()
            engine.before_optimizer_step(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if way != "fully_shard":
            engine.after_optimizer_step()
        losses.append(float(loss.detach()))
    if way != "fully_shard":
        engine.restore([optimizer])
    return losses


WAYS = ("float32", "autocast", "reduced in bf16", "fully_shard")


def run_all(rank: int, ranks: int) -> tuple[Any, ...]:
    losses = {way: losses_of(rank, way) for way in WAYS}
    return train(rank, ranks), odd(rank, ranks), losses, train_plain(rank), tied(rank)


@pytest.fixture(scope="module")
def all_runs() -> list[Any]:
    return run_ranks(run_all, RANKS)


@pytest.fixture(scope="module")
def runs(all_runs: list[Any]) -> list[dict[Any, Any]]:
    return [trained for trained, *_ in all_runs]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_gathered_casts_train_to_the_same_bits_with_about_half_the_bytes(runs: list[Any], case: Any) -> None:
    for run in runs:
        (losses, state, num_bytes, _), (cast_losses, cast_state, cast_bytes, dtypes) = run[case]
        assert cast_losses == losses
        assert dtypes == {torch.float32}
        assert_equal(cast_state, state)
        assert cast_bytes < 0.55 * num_bytes or "mixed" in case[0]
        assert cast_bytes < num_bytes


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_weights_are_those_of_a_plain_module_with_rounded_rows_and_are_not_rounded_themselves(
    all_runs: list[Any], mode: str
) -> None:
    trained, *_, plain, _ = all_runs[0]  # a state is that of the first rank
    _, (model, _), *_ = trained[mode, False, 1][1]
    torch.testing.assert_close(dict(model), plain[mode], rtol=1e-5, atol=1e-6)
    table = model["embed.weight"]
    assert float((table != table.to(torch.float16 if mode == "zdp2" else torch.bfloat16)).float().mean()) > 0.9


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
@pytest.mark.parametrize("layer", LAYERS | TABLES)
def test_weight_read_in_other_ways_than_traced_has_its_own_values(all_runs: list[Any], layer: str, mode: str) -> None:
    for _, run, *_ in all_runs:
        expected, found = run[layer, mode]
        assert all(torch.tensor(expected[0]).isfinite())
        assert found[0] == expected[0]
        assert_equal(found[1:], expected[1:])
        assert all(p.dtype == torch.float32 for p in found[2].values())


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_tied_table_that_is_not_gathered_for_the_backward_trains_to_the_same_bits(
    all_runs: list[Any], mode: str
) -> None:
    """Autograd has saved the cast that the head reads; the embedding reads nothing."""
    model = Model().net
    saved = STEPS * (model.embed.weight.nbytes + model.position.nbytes) if mode == "zdp" else 0
    for *_, run in all_runs:
        (losses, state, num_bytes, _), (other_losses, other_state, other_bytes, _), *_ = run[mode]
        assert losses == other_losses
        assert_equal(state, other_state)
        assert other_bytes - num_bytes == saved


@pytest.mark.parametrize("mode", ["zdp", "zdp2"])
def test_tied_table_that_is_gathered_as_a_cast_trains_to_the_bits_of_rounded_rows(
    all_runs: list[Any], mode: str
) -> None:
    """The head reads the same cast, which is gathered again for its backward in ``zdp``."""
    for *_, run in all_runs:
        *_, (losses, state, *_), (expected_losses, expected_state, *_) = run[mode]
        assert losses == expected_losses
        assert_equal(state, expected_state)


def test_losses_of_50_steps_are_as_near_to_float32_as_those_of_fully_shard(all_runs: list[Any]) -> None:
    """Ranks see other data, so their losses are averaged."""
    mean = {way: torch.tensor([run[2][way] for run in all_runs]).mean(0) for way in WAYS}
    away = {way: float((mean[way] - mean["float32"]).abs().mean()) for way in WAYS}
    assert mean["float32"][-1] < 0.6 * mean["float32"][0]  # it learns
    assert 0 < away["autocast"] <= 1.1 * away["fully_shard"], away
    assert 0 < away["reduced in bf16"] <= 1.5 * away["fully_shard"], away


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list | tuple):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right
