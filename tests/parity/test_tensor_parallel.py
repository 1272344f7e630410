"""Training with tensor parallel operators equals training one process on the mean of the ranks' losses."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_osdp.engine.fairscale.engine import FairScaleEngine
from lightning_osdp.engine.tensor_parallel.exchange import Phase
from lightning_osdp.engine.tensor_parallel.operator_run import SlicedRun
from lightning_osdp.engine.tensor_parallel.run_start import RunStarts
from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.planning.spec.choices import Mode
from lightning_osdp.state.guarded_parameter import local_data
from tests.support.models import some_cluster, two_groups
from tests.support.ranks import run_ranks
from tests.support.tensor_models import (
    ATTENTION_SPLITS,
    SPLITS,
    Attending,
    Sample,
    Wide,
    loss_of,
    make_sample,
    split_sample,
    tensor_plan,
)

STEPS, MAX_NORM = 4, 0.5

EVERYTHING = ("embed", "tags", "sets", "mlp", "conv", "head")
ATTENTIONS = ("attention", "fused", "c_proj")


@dataclass(frozen=True)
class Case:
    """What is tensor parallel with which degree (0: all ranks), and how the training differs from the usual."""

    degrees: dict[str, int]
    others: dict[str, Mode] = field(default_factory=dict)
    accumulation: int = 1
    recomputed: tuple[str, ...] = ()
    ragged: bool = False
    """Ranks have batches of other sizes and lengths, in each step others."""
    skipped: tuple[str, ...] = ()
    """What the last rank does not run in every second step."""
    steady: int = 0
    """First steps in which all ranks do the same."""
    is_prefetched: bool = False
    """Whether what is sharded is gathered while others compute."""
    frozen: tuple[str, ...] = ()
    raw: bool = False
    """Backward passes, clipping and steps of the optimizer are the user's own: no strategy sees them."""
    attention: bool = False
    """Of the model with attentions, some of whose ranks have masks and others none."""


ZDP_AROUND_MLP = {"tags": Mode.ZDP, "sets": Mode.ZDP, "conv.c_fc": Mode.ZDP, "conv.c_proj": Mode.ZDP2, "head": Mode.ZDP}

CASES = {
    "embedding": Case({"embed": 0}),
    "bags": Case({"tags": 0, "sets": 0}),
    "linear": Case({"head": 0}),
    "pairs": Case({"mlp": 0, "conv": 0}),
    "all": Case(dict.fromkeys(EVERYTHING, 0)),
    "all of degree 2": Case(dict.fromkeys(EVERYTHING, 2)),
    "degrees 2 and all": Case({"embed": 0, "tags": 2, "mlp": 2, "conv": 0, "head": 2}),
    "with zdp": Case({"embed": 2, "mlp": 2}, {"head": Mode.ZDP, "conv.c_fc": Mode.ZDP, "tags": Mode.ZDP}),
    "with zdp2": Case({"tags": 2, "conv": 0}, {"head": Mode.ZDP2, "mlp.up": Mode.ZDP2, "embed": Mode.ZDP2}),
    "accumulation": Case(dict.fromkeys(EVERYTHING, 2), accumulation=2),
    "recomputation": Case(dict.fromkeys(EVERYTHING, 0), {}, recomputed=("mlp", "conv")),
    "recomputation of a linear": Case({"head": 2, "mlp": 2}, {"conv.c_fc": Mode.ZDP}, recomputed=("head", "conv")),
    "batches that differ": Case(dict.fromkeys(EVERYTHING, 0), ragged=True),
    "batches that differ, degree 2": Case(dict.fromkeys(EVERYTHING, 2), {}, ragged=True, accumulation=2),
    "a pair that a rank skips": Case(dict.fromkeys(EVERYTHING, 2), skipped=("mlp",)),
    "a table that a rank skips": Case(dict.fromkeys(EVERYTHING, 0), skipped=("tags", "conv"), ragged=True),
    "skipped and accumulated": Case(dict.fromkeys(EVERYTHING, 2), skipped=("mlp", "tags"), accumulation=2),
    "skipped and recomputed": Case(dict.fromkeys(EVERYTHING, 0), skipped=("conv",), recomputed=("mlp", "conv")),
    "attentions": Case(dict.fromkeys(ATTENTIONS, 0), attention=True),
    "attentions and more": Case(dict.fromkeys((*ATTENTIONS, "embed", "head"), 2), attention=True, accumulation=2),
    "attentions with zdp": Case(dict.fromkeys(ATTENTIONS, 2), {"embed": Mode.ZDP, "head": Mode.ZDP2}, attention=True),
    "attentions, other lengths": Case(dict.fromkeys((*ATTENTIONS, "head"), 0), ragged=True, attention=True),
    "attentions recomputed": Case(dict.fromkeys(ATTENTIONS, 2), recomputed=("attention", "fused"), attention=True),
    "attentions that a rank skips": Case(dict.fromkeys(ATTENTIONS, 2), skipped=ATTENTIONS, attention=True),
    "attentions of frozen inputs": Case(dict.fromkeys(ATTENTIONS, 0), frozen=("embed", "norm"), attention=True),
    "steady, then batches that differ": Case(dict.fromkeys(EVERYTHING, 0), ragged=True, steady=2),
    "steady, then skipped": Case(dict.fromkeys(EVERYTHING, 2), {}, skipped=("mlp", "tags", "embed"), steady=3),
    "steady attentions, then skipped": Case(dict.fromkeys(ATTENTIONS, 2), skipped=ATTENTIONS, attention=True, steady=3),
    "prefetched": Case({"mlp": 0, "embed": 0}, ZDP_AROUND_MLP, is_prefetched=True),
    "prefetched and accumulated": Case({"mlp": 2}, ZDP_AROUND_MLP, accumulation=2, is_prefetched=True),
    "prefetched and recomputed": Case({"mlp": 0}, ZDP_AROUND_MLP, recomputed=("mlp", "conv"), is_prefetched=True),
    "prefetched, then skipped": Case({"mlp": 2}, ZDP_AROUND_MLP, skipped=("mlp",), steady=2, is_prefetched=True),
    "prefetched attentions": Case(
        {"attention": 0},
        {"fused.c_attn": Mode.ZDP, "c_proj": Mode.ZDP, "head": Mode.ZDP2},
        attention=True,
        is_prefetched=True,
    ),
    "raw": Case(dict.fromkeys(EVERYTHING, 2), raw=True),
    "raw and accumulated": Case(dict.fromkeys(ATTENTIONS, 2), {"embed": Mode.ZDP}, 2, attention=True, raw=True),
    "raw and skipped": Case({"mlp": 2, "tags": 2, "head": 2}, {"embed": Mode.ZDP}, skipped=("mlp", "tags"), raw=True),
    "frozen": Case(dict.fromkeys(EVERYTHING, 2), frozen=("embed", "mlp.up", "head")),
}


def samples_of(case: Case, ranks: int) -> list[list[Sample]]:
    """Each rank's batch of each step."""

    def size(step: int, rank: int) -> tuple[int, int]:
        is_ragged = case.ragged and step >= case.steady
        return (2 + 2 * ((step + rank) % 3), 5 + (step * rank) % 4) if is_ragged else (4, 6)

    return [[make_sample(100 * step + rank, *size(step, rank)) for rank in range(ranks)] for step in range(STEPS)]


def skipped_by(case: Case, step: int, rank: int, ranks: int) -> tuple[str, ...]:
    return case.skipped if step % 2 and step >= case.steady and rank == ranks - 1 else ()


def make_model(case: Case, seed: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Attending() if case.attention else Wide()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(start) for start in case.frozen))
    optimizer = two_groups(model, lr=3e-3)
    for group in optimizer.param_groups:
        group["eps"] = 1e-4  # a gradient of a few roundings makes no full step
    return model, optimizer


def train_plain(case: Case, ranks: int) -> dict[str, Any]:
    model, optimizer = make_model(case)
    losses, norms = [], []
    for step, by_rank in enumerate(samples_of(case, ranks)):
        optimizer.zero_grad()
        parts = [(rank, part) for rank, s in enumerate(by_rank) for part in split_sample(s, case.accumulation)]
        each = [loss_of(model, part, skipped_by(case, step, rank, ranks)) for rank, part in parts]
        loss = torch.stack(each).mean()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        logits = model.eval()(make_sample(7, 3, 4))
    return {
        "losses": losses,
        "norms": norms,
        "weights": model.state_dict(),
        "states": optimizer.state_dict()["state"],
        "logits": logits,
    }


def count_sliced_runs(engine: FairScaleEngine) -> Counter[str]:
    """Counts runs with slices by unit from now on, where others are of whole weights."""
    counts: Counter[str] = Counter()

    def counting(unit: TensorUnit, start: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            run, numbers = start(*args, **kwargs)
            counts[unit.label] += isinstance(run, SlicedRun)
            return run, numbers

        return count

    for unit in engine._tensor_units:
        vars(unit)["start"] = counting(unit, unit.start)
    return counts


def gathers_early(starts: RunStarts) -> bool:
    return starts._is_expected and starts._rows is not None


def note_early_averages(engine: FairScaleEngine) -> list[int]:
    """Grows with the number of gradients whose average was started before the backward pass was over."""
    noted: list[int] = []

    def noting(queue: Any, finish: Any) -> Any:
        def note(weights: Any) -> None:
            noted.append(queue.num_early)
            finish(weights)

        return note

    for queue in engine._slice_averages._queues.values():
        queue.finish = noting(queue, queue.finish)
    return noted


def train_tensor_parallel(rank: int, ranks: int, case: Case) -> dict[str, Any]:
    model, optimizer = make_model(case, seed=1 + rank)
    identities = {name: id(parameter) for name, parameter in model.named_parameters()}
    degrees = {name: degree or ranks for name, degree in case.degrees.items()}
    engine = FairScaleEngine(torch.device("cpu"))
    splits = ATTENTION_SPLITS if case.attention else SPLITS
    cluster = some_cluster(ranks, prefetch_max_bytes=(1 << 30) * case.is_prefetched)
    plan = tensor_plan(degrees, ranks, case.others, splits, recomputed=case.recomputed, cluster=cluster)
    engine.apply(model, plan, [optimizer])
    num_sliced, early_averages = count_sliced_runs(engine), note_early_averages(engine)
    local = {name: local_data(p).numel() for name, p in model.named_parameters()}
    losses, norms = [], []
    for step, by_rank in enumerate(samples_of(case, ranks)):
        optimizer.zero_grad()
        total = 0.0
        for i, part in enumerate(split_sample(by_rank[rank], case.accumulation)):
            if not case.raw or i == 0:
                engine.before_forward()
            with nullcontext() if case.raw or i == case.accumulation - 1 else engine.no_sync():
                loss = loss_of(model, part, skipped_by(case, step, rank, ranks)) / case.accumulation
                loss.backward()
                if not case.raw:
                    engine.finish_backward()
            total += float(loss.detach())
        if case.raw:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
            optimizer.step()
        else:
            norms.append(float(engine.clip_grad_norm(model.parameters(), MAX_NORM)))
            engine.before_optimizer_step(optimizer)
            optimizer.step()
            engine.after_optimizer_step()
        losses.append(total)
    assert identities == {name: id(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        logits = model.eval()(make_sample(7, 3, 4 + rank))[:, :4] if case.ragged else model.eval()(make_sample(7, 3, 4))
    return {
        "losses": losses,
        "norms": norms,
        "weights": engine.model_state(),
        "states": engine.optimizer_state(optimizer),
        "logits": logits,
        "local": local,
        "num_sliced": {name: num_sliced[name] for name in sorted(num_sliced)},
        "early averages": early_averages,
        "expected": {unit.label for unit in engine._tensor_units if gathers_early(unit._starts[Phase.START])},
    }


AT_FOUR = (
    "all of degree 2",
    "degrees 2 and all",
    "with zdp",
    "recomputation of a linear",
    "batches that differ, degree 2",
    "a pair that a rank skips",
    "skipped and accumulated",
    "steady, then skipped",
    "prefetched and accumulated",
    "prefetched, then skipped",
    "attentions and more",
    "raw",
    "raw and accumulated",
    "raw and skipped",
    "attentions that a rank skips",
)
"""Cases of 4 ranks, most of them in two groups; all others are of 2 ranks."""

ALL_RUNS = [(4 if name in AT_FOUR else 2, name) for name in CASES]


def train_all(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """Every case in the same processes, since starting them takes longer than training."""
    return {name: train_tensor_parallel(rank, ranks, CASES[name]) for size, name in ALL_RUNS if size == ranks}


@cache
def run_all(ranks: int) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(train_all, ranks)


def results_of(ranks: int, name: str) -> list[dict[str, Any]]:
    """What each rank returned."""
    return [results[name] for results in run_all(ranks)]


def assert_same(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize(("ranks", "name"), ALL_RUNS)
def test_tensor_parallel_training_has_the_losses_norms_weights_and_states_of_plain_training(
    ranks: int, name: str
) -> None:
    results = results_of(ranks, name)
    expected = train_plain(CASES[name], ranks)
    losses = torch.tensor([result["losses"] for result in results]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected["losses"]), rtol=1e-5, atol=0)
    for result in results:
        torch.testing.assert_close(torch.tensor(result["norms"]), torch.tensor(expected["norms"]), rtol=1e-5, atol=0)
        if not CASES[name].ragged:
            assert_same(result["logits"], expected["logits"], "logits")
    weights, states = results[0]["weights"], results[0]["states"]["state"]
    assert list(weights) == list(expected["weights"])
    for key, weight in expected["weights"].items():
        assert_same(weights[key], weight, key)
    assert states.keys() == expected["states"].keys()
    for number, entries in expected["states"].items():
        assert_same(states[number]["exp_avg"], entries["exp_avg"], f"exp_avg of {number}")


@pytest.mark.parametrize(("ranks", "name"), [(2, "all"), (2, "batches that differ"), (4, "a pair that a rank skips")])
def test_ranks_that_run_the_same_run_it_with_slices(ranks: int, name: str) -> None:
    for rank, result in enumerate(results_of(ranks, name)):
        counts = dict(result["num_sliced"])
        if CASES[name].skipped and rank // 2 == 1:  # the group of the rank that skips
            assert counts.pop("mlp") == STEPS + 1 - STEPS // 2
        assert counts == dict.fromkeys(counts, STEPS + 1)


def test_gradients_of_slices_are_averaged_during_the_backward_pass_from_the_second_step_on() -> None:
    for result in results_of(4, "all of degree 2"):
        assert result["early averages"] == [0, *[len(SPLITS)] * (STEPS - 1)]
    for rank, result in enumerate(results_of(4, "a pair that a rank skips")):
        first, second, *_ = result["early averages"]
        assert (first, 0 < second < len(SPLITS)) == (0, rank // 2 == 1)  # where the whole weights of the pair were


def test_rows_are_gathered_while_ranks_tell_each_other_what_they_have_if_they_had_the_same_before() -> None:
    units = {"embed", "mlp", "conv", "head"}  # bags are gathered in other ways
    for name, expected in (("all", units), ("frozen", units), ("batches that differ", set())):
        assert all(result["expected"] == expected for result in results_of(2, name))
    assert all("mlp" not in result["expected"] for result in results_of(4, "steady, then skipped")[2:])
    assert all("head" in result["expected"] for result in results_of(4, "steady, then skipped"))


def test_attention_runs_with_slices_where_all_ranks_have_a_mask_or_none_has() -> None:
    has_mask = [[bool((s["tokens"] < 2).any()) for s in by_rank] for by_rank in samples_of(CASES["attentions"], 2)]
    alike = sum(len(set(by_rank)) == 1 for by_rank in has_mask)
    assert 0 < alike < STEPS
    for result in results_of(2, "attentions"):
        assert result["num_sliced"] == {"attention": alike + 1, "fused": alike + 1}


@pytest.mark.parametrize(("ranks", "name"), [(2, "all"), (4, "all of degree 2")])
def test_each_rank_holds_its_slices_alone(ranks: int, name: str) -> None:
    whole = {key: parameter.numel() for key, parameter in Wide().named_parameters()}
    for result in results_of(ranks, name):
        for operator in SPLITS:
            assert result["local"][f"{operator}.weight"] == whole[f"{operator}.weight"] // 2
