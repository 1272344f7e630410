"""Attentions that are given a cache of keys and values, as transformers make one, train as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lightning_osdp.engine.tensor_parallel.unit import TensorUnit
from lightning_osdp.errors import ShardingError
from lightning_osdp.planning.spec.plan import ExecutionPlan
from tests.parity.test_tensor_parallel_models import (
    Batch,
    Case,
    batch_of,
    make_model,
    shortened,
    train_cut,
    train_plain,
)
from tests.support import families, zoo
from tests.support.ranks import run_ranks
from tests.support.tensor_plans import plan_of_candidates

RANKS = 2


def continue_without_gradients(net: nn.Module, batch: Batch) -> Tensor:
    """Train on the second half of samples, after the cached first half."""
    first, rest = batch["input_ids"].split(6, 1)
    with torch.no_grad():
        cache = net(input_ids=first).past_key_values
    assert cache.get_seq_length() == 6
    return net(input_ids=rest, labels=rest, past_key_values=cache).loss  # type: ignore[no-any-return]


def generate(net: nn.Module, batch: Batch) -> Tensor:
    """Train on what the model itself goes on with."""
    with torch.no_grad():
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": True}
        ids = net.generate(batch["input_ids"][:, :8], **options)  # type: ignore[operator]
    return net(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def give_a_cache(net: nn.Module, batch: Batch) -> Tensor:
    """Give an empty cache that makes its layers when they are needed."""
    return net(**batch, past_key_values=transformers.DynamicCache()).loss  # type: ignore[no-any-return]


def use_none(net: nn.Module, batch: Batch) -> Tensor:
    return net(**batch, use_cache=False).loss  # type: ignore[no-any-return]


def read_keys(net: nn.Module, batch: Batch) -> Tensor:
    out = net(**batch)
    return out.loss + out.past_key_values.layers[0].keys.mean()  # type: ignore[no-any-return]


def copy_values(net: nn.Module, batch: Batch) -> Tensor:
    out = net(**batch)
    return out.loss + float(out.past_key_values.layers[1].values.detach().cpu().max())  # type: ignore[no-any-return]


def ask_length(net: nn.Module, batch: Batch) -> Tensor:
    out = net(**batch)
    return out.loss * out.past_key_values.get_seq_length()  # type: ignore[no-any-return]


def continue_with_gradients(net: nn.Module, batch: Batch) -> Tensor:
    first, rest = batch["input_ids"].split(6, 1)
    return net(input_ids=rest, labels=rest, past_key_values=net(input_ids=first).past_key_values).loss  # type: ignore[no-any-return]


USES: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    use.__name__: use for use in (continue_without_gradients, generate, give_a_cache, use_none)
}
REFUSED = {use.__name__: use for use in (read_keys, copy_values, ask_length, continue_with_gradients)}


class Cached(zoo.ZooModule):
    """A model with the default ``use_cache=True``, whose batches may ask for one of the uses."""

    def __init__(self, module: zoo.ZooModule) -> None:
        super().__init__(zoo.with_cache(module).net, module.rows)

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        for name, use in (USES | REFUSED).items():
            if name in batch:
                return use(self.net, {key: value for key, value in batch.items() if key != name})
        return super().training_step(batch, batch_index)


def asking(use: str, batch: Batch, step: int, rank: int, first: int = 0) -> Batch:
    """Ask for a use in every other step, which the traced step is not, on ranks from the first on."""
    return batch | {use: torch.ones(len(batch["labels"]))} if step % 2 and rank >= first else batch


def gpt2() -> Cached:
    return Cached(zoo.gpt2())


def llama() -> Cached:
    return Cached(zoo.llama(num_attention_heads=4, num_key_value_heads=2))


CASES = {
    "GPT-2": Case(gpt2, "zdp", units=4),
    "GPT-2, recomputed": Case(gpt2, "zdp", recomputed=("net.transformer.h.0", "net.transformer.h.1"), units=4),
    "LLaMA": Case(llama, "mixed", units=4),
    "LLaMA, recomputed": Case(llama, "dp", recomputed=("net.model.layers.0", "net.model.layers.1"), units=4),
    "LLaMA, other lengths": Case(llama, "zdp2", shortened, units=4),
    "Mistral": Case(lambda: Cached(families.build("mistral", sliding_window=5)), "dp", units=4),
    "OPT": Case(lambda: Cached(families.build("opt", dropout=0.0)), "dp", units=4),
} | {use: Case(llama, "zdp", partial(asking, use), units=4) for use in USES}
CASES["use_none, on one rank"] = replace(CASES["use_none"], change=partial(asking, "use_none", first=1))
WITH_WHOLE_WEIGHTS = {"LLaMA, other lengths", "continue_without_gradients", "generate", "use_none, on one rank"}
"""Cases in which some runs differ between ranks, or are given a cache that matters."""
REFUSED_CASES = {use: Case(gpt2, "zdp", partial(asking, use), units=4) for use in REFUSED}


def train_all(rank: int, ranks: int, plans: dict[str, ExecutionPlan]) -> dict[str, Any]:
    """What each case gives, and how often its units gather whole weights."""
    own, gathers = TensorUnit._gather_whole, list[str]()

    def gather_whole(unit: TensorUnit) -> Any:
        gathers.append(unit.label)
        return own(unit)

    TensorUnit._gather_whole = gather_whole  # type: ignore[method-assign]
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        gathers.clear()
        results[name] = (*train_cut(rank, case, plans[name]), len(gathers))
    for name, case in REFUSED_CASES.items():
        with pytest.raises(ShardingError) as raised:
            train_cut(rank, case, plans[name])
        results[name] = str(raised.value)
    return results


@pytest.fixture(scope="module")
def plans() -> dict[str, ExecutionPlan]:
    found = {}
    for name, case in (CASES | REFUSED_CASES).items():
        module, _ = make_model(case)
        found[name] = plan_of_candidates(module, batch_of(case, module, 0, 0), RANKS, case.rest, case.recomputed)
    return found


@pytest.fixture(scope="module")
def results(plans: dict[str, ExecutionPlan]) -> list[dict[str, Any]]:
    return run_ranks(train_all, RANKS, plans)


@pytest.mark.parametrize("name", CASES)
def test_attentions_with_a_cache_are_cut_and_train_as_plain_pytorch(
    plans: dict[str, ExecutionPlan], results: list[dict[str, Any]], name: str
) -> None:
    attentions = [scope for scope, needs in plans[name].tensor_scopes.items() if needs.needs_agreement]
    assert len(attentions) == 2
    losses, weights = train_plain(CASES[name], RANKS)
    assert all((each[name][2] > 0) == (name in WITH_WHOLE_WEIGHTS) for each in results)
    averages = torch.tensor([each[name][0] for each in results]).mean(0)
    torch.testing.assert_close(averages, torch.tensor(losses), rtol=1e-5, atol=0)
    for key, weight in weights.items():
        torch.testing.assert_close(results[0][name][1][key], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED_CASES)
def test_keys_and_values_of_a_run_with_slices_are_not_taken_for_the_whole(
    results: list[dict[str, Any]], name: str
) -> None:
    """They are read in later steps only, so that the traced one gave no reason not to cut."""
    for each in results:
        assert "sees what is between the operators of net.transformer.h." in each[name]
        assert "OSDPCallback(tensor_parallel=False)" in each[name]
