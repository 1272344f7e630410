"""Parameters that are used outside of their operators' forward have the values of plain PyTorch, under every plan."""

from __future__ import annotations

import re
import traceback
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.support.door_uses import DOORS, REFUSED_DOORS
from tests.support.kept_views import KEPT_VIEWS, REFUSED_ELSEWHERE
from tests.support.models import hand_made_plan
from tests.support.odd_uses import ODD_USES
from tests.support.outside_uses import IN, REFUSALS, USES, Model, Use
from tests.support.ranks import run_ranks
from tests.support.split_plans import split_plan

STEPS, BATCH, RANKS = 4, 8, 2
CPU = torch.device("cpu")
OPERATORS = [f"{part}.{layer}" for part in ("student", "teacher") for layer in ("up", "down")] + ["items"]
POLICIES = ["zdp", "zdp2", "mixed", "slices"]
ALL_USES, ALL_REFUSALS = USES | DOORS | ODD_USES | KEPT_VIEWS, REFUSALS | REFUSED_DOORS | REFUSED_ELSEWHERE


def plan_of(policy: str) -> ExecutionPlan:
    """``mixed`` cuts the teacher in another way than the student, ``slices`` along both dimensions."""
    if policy == "slices":
        modes = (Mode.ZDP, Mode.DP, Mode.ZDP2)
        return split_plan(
            {name: (modes, index % 2 or int(name == "items")) for index, name in enumerate(OPERATORS)}, RANKS
        )
    if policy == "mixed":
        mixed = [Mode.ZDP, Mode.ZDP2, Mode.DP, Mode.ZDP, Mode.ZDP]
        return hand_made_plan(dict(zip(OPERATORS, mixed, strict=True)), RANKS)
    return hand_made_plan(dict.fromkeys(OPERATORS, Mode(policy)), RANKS)


def batches() -> Tensor:
    return torch.randn(STEPS, BATCH, IN, generator=torch.Generator().manual_seed(5))


def start(name: str) -> tuple[Model, Use, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Model()
    use = ALL_USES[name](model)
    return model, use, use.make_optimizer(model)


@cache
def train_plain(name: str) -> tuple[list[Any], dict[str, Tensor]]:
    model, use, optimizer = start(name)
    for step, batch in enumerate(batches()):
        use.loss(batch, step).backward()
        use.after_backward(step)
        optimizer.step()
        optimizer.zero_grad()
        use.after_step(step)
    return use.noted, model.state_dict()


def train(rank: int, name: str, policy: str) -> tuple[list[Any], dict[str, Tensor]]:
    model, use, optimizer = start(name)
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan_of(policy), [optimizer])
    for step, batch in enumerate(batches()):
        engine.before_forward()
        use.loss(batch.chunk(RANKS)[rank], step).backward()
        engine.finish_backward()
        use.after_backward(step)
        engine.before_optimizer_step(optimizer)
        optimizer.step()
        engine.after_optimizer_step()
        optimizer.zero_grad()
        use.after_step(step)
    return use.noted, engine.model_state()


def train_all(rank: int, ranks: int, names: list[str], policies: list[str]) -> Any:
    """Every use under every policy in the same processes, since starting them takes longer than training."""
    results: dict[tuple[str, str], Any] = {}
    warnings.simplefilter("ignore")
    for name in names:
        for policy in policies:
            try:
                results[name, policy] = train(rank, name, policy)
            except Exception:
                results[name, policy] = traceback.format_exc()
    results |= {("refused", policy): refuse_all(policy) for policy in policies}
    return results


def refuse_all(policy: str) -> dict[str, str]:
    """The error of each use that is refused; the values stay what they were."""
    model, _, optimizer = start("Looks")
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan_of(policy), [optimizer])
    before, told = model.items.weight.detach().clone(), {}
    if policy == "zdp":
        unasked = torch.FloatTensor(model.items.weight)
        told["unasked"] = f"{tuple(unasked.shape)}, all NaN: {unasked.isnan().all()}"
        with pytest.raises(RuntimeError):
            unasked.fill_(1.0)
    for name, (use, _) in ALL_REFUSALS.items():
        try:
            use(model)
            told[name] = "nothing"
        except Exception as error:
            told[name] = str(error)
    assert torch.equal(model.items.weight, before)
    told["shared memory at the start"] = refuse_shared_memory(policy)
    told["views after the run"] = share_again(policy)
    told["gradient of a micro-batch"] = read_between_micro_batches(policy)
    return told


def refuse_shared_memory(policy: str) -> str:
    """The error for a weight that lies in memory that other processes may use."""
    model, _, _ = start("Looks")
    model.items.weight.data.share_memory_()
    with pytest.raises(ShardingError) as caught:
        FairScaleEngine(CPU).check(model, plan_of(policy))
    return str(caught.value)


def share_again(policy: str) -> str:
    """Views that were taken before and during the run are views of the whole parameters again when it is over."""
    model, _, optimizer = start("Looks")
    views = [(model.items.weight, model.items.weight.data[1:]), (model.student.up.weight, model.student.up.weight[:2])]
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan_of(policy), [optimizer])
    model.loss(batches()[0]).backward()
    engine.finish_backward()
    optimizer.step()
    assert torch.equal(views[0][1], model.items.weight[1:])
    engine.restore([optimizer])
    for parameter, view in views:
        parameter.data.mul_(2)
        assert type(view) is Tensor
        assert torch.equal(view, parameter[1:] if view is views[0][1] else parameter[:2])
    return "shared"


def read_between_micro_batches(policy: str) -> str:
    """Whether a gradient that is read while gradients accumulate is the average over the ranks so far."""
    model, _, optimizer = start("Looks")
    plain, _, _ = start("Looks")
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan_of(policy), [optimizer])
    engine.before_forward()
    batch = batches()[0]
    with engine.no_sync():
        model.loss(batch.chunk(RANKS)[torch.distributed.get_rank()]).backward()
        engine.finish_backward()
    plain.loss(batch).backward()
    try:
        torch.testing.assert_close(model.items.weight.grad + 0.0, plain.items.weight.grad)
        told = "average"
    except ShardingError as error:
        told = str(error)
    optimizer.zero_grad()
    assert model.items.weight.grad is None
    engine.restore([optimizer])
    return told


ABOUT_SLICES = {
    ("LateHooks", "slices"): "it runs in slices, which call no hooks of it",
    ("FastWeights", "slices"): "autograd knows its slices alone, so its gradient can't be asked for",
    ("KeptByProduct", "slices"): "Linear has a forward of its own",
    (
        "ForwardMode",
        "slices",
    ): "forward-mode differentiation can't transform what a sharded module does: an operator runs",
}
"""Uses that a plan with slices refuses; the search never splits weights whose gradient a step asks for."""


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    """What each rank returned."""
    return run_ranks(train_all, RANKS, [*ALL_USES], POLICIES)


@pytest.mark.filterwarnings(
    "ignore:To copy construct from a tensor", "ignore:.*torch.jit.script", "ignore:Full backward hook"
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ALL_USES)
def test_use_outside_of_operator_has_values_of_plain_pytorch(runs: list[Any], name: str, policy: str) -> None:
    noted, weights = train_plain(name)
    for rank, results in enumerate(runs):
        result = results[name, policy]
        if (name, policy) in ABOUT_SLICES:
            assert ABOUT_SLICES[name, policy] in result
            continue
        assert not isinstance(result, str), result
        seen, state = result
        assert len(seen) == len(noted)
        for index, (value, expected) in enumerate(zip(seen, noted, strict=True)):
            if isinstance(expected, Tensor | float) or (isinstance(expected, list) and isinstance(expected[0], list)):
                ours, theirs = torch.as_tensor(value), torch.as_tensor(expected)
                assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), f"note {index} on rank {rank}"
            else:
                assert value == expected, f"note {index} on rank {rank}"
        if rank == 0:
            torch.testing.assert_close(state, dict(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ALL_REFUSALS)
def test_use_that_cannot_be_right_is_refused_with_its_reason(runs: list[Any], name: str, policy: str) -> None:
    for results in runs:
        assert re.search(ALL_REFUSALS[name][1], results["refused", policy][name]), results["refused", policy][name]


def test_weight_in_shared_memory_is_refused(runs: list[Any]) -> None:
    for results in runs:
        for policy in POLICIES:
            text = "items can't be sharded: items.weight lies in memory that is shared with other processes"
            assert text in results["refused", policy]["shared memory at the start"]


def test_views_share_the_memory_of_whole_parameters_after_the_run(runs: list[Any]) -> None:
    assert all(results["refused", policy]["views after the run"] == "shared" for results in runs for policy in POLICIES)


def test_gradient_that_is_read_between_micro_batches_is_the_average_of_the_ranks(runs: list[Any]) -> None:
    for policy in POLICIES:
        text = "its replicated slices have gradients of this rank" if policy == "slices" else "average"
        assert all(text in results["refused", policy]["gradient of a micro-batch"] for results in runs)


def test_code_that_asks_no_class_sees_nan_of_the_full_shape(runs: list[Any]) -> None:
    for results in runs:
        assert results["refused", "zdp"]["unasked"] == "(7, 6), all NaN: True"


def read_on_one_rank(rank: int, ranks: int, reads_state: bool) -> str:
    """The error of each rank where the first one alone reads weights, and the others train on."""
    model, _, optimizer = start("Looks")
    engine = FairScaleEngine(CPU)
    engine.apply(model, plan_of("zdp"), [optimizer])

    def read_or_go_on() -> None:
        if rank == 0:
            _ = model.items.state_dict() if reads_state else model.items.weight.norm()
        engine.before_forward()

    with pytest.raises(ShardingError) as caught:
        read_or_go_on()
    return str(caught.value)


@pytest.mark.parametrize("reads_state", [False, True], ids=["norm", "state_dict"])
def test_read_on_one_rank_alone_is_an_error_on_all_that_names_the_parameter(reads_state: bool) -> None:
    for told in run_ranks(read_on_one_rank, RANKS, reads_state, timeout_s=60):
        assert "rank 0 reads or changes items.weight outside of its operator" in told
