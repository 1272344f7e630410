"""Attentions that are given a cache of keys and values: which may be cut by heads, and which not and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, StaticCache

from lightning_osdp.engine.activation_checkpointing import checkpoint_block
from lightning_osdp.engine.key_value_cache import copy_cache, describe_unused
from tests.support import families, zoo
from tests.unit.profiling.test_tensor_scopes import groups, profile_of

HOLDS_ANYTHING = "an argument is a {}, which may hold anything"
READ_LATER, USED_LATER = "what it puts in a cache is read later", "it is used again later"


def numbered_llama() -> zoo.ZooModule:
    """Its blocks know their number as their attentions do."""
    module = zoo.llama()
    for number, block in enumerate(module.net.model.layers):  # type: ignore[union-attr, arg-type]
        block.layer_idx = number
    return module


def scopes_of(module: zoo.ZooModule) -> tuple[set[str], str]:
    """Return the attentions that may be cut, and why others may not."""
    profile = profile_of(module, module.batch(4))
    names = {each.scope for each in groups(profile).values() if each.needs_agreement and each.scope is not None}
    reasons = {reason.rpartition(": ")[2] for reason in profile.tensor_group_refusals.values()}
    return names, " / ".join(sorted(reasons))


MODELS: dict[str, Callable[[], zoo.ZooModule]] = {
    "gpt2": zoo.gpt2,
    "llama": zoo.llama,
    "opt": lambda: families.build("opt"),
    "qwen2": lambda: families.build("qwen2"),
    "mistral": lambda: families.build("mistral"),
    "numbered blocks": numbered_llama,
    "sliding windows": lambda: families.build("mistral", sliding_window=5),
}


@pytest.mark.parametrize("name", MODELS)
def test_attentions_that_fill_a_cache_are_found_as_without(name: str) -> None:
    without, _ = scopes_of(MODELS[name]())
    found, reasons = scopes_of(zoo.with_cache(MODELS[name]()))
    assert len(found) == 2
    assert (found, reasons) == (without, "")


class Using(zoo.ZooModule):
    """A GPT-2 whose step does something with the cache."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        module = zoo.with_cache(zoo.gpt2())
        super().__init__(module.net, module.rows)
        self.use = use

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        return self.use(self.net, batch["input_ids"])


def loss_of(net: nn.Module, ids: Tensor, cache: Any = None) -> Any:
    return net(input_ids=ids, labels=ids, past_key_values=cache)


def reads_keys(net: nn.Module, ids: Tensor) -> Tensor:
    out = loss_of(net, ids)
    return out.loss + out.past_key_values.layers[1].keys.mean()  # type: ignore[no-any-return]


def asks_length(net: nn.Module, ids: Tensor) -> Tensor:
    out = loss_of(net, ids)
    return out.loss * out.past_key_values.get_seq_length(1)  # type: ignore[no-any-return]


def goes_on(net: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(net, ids[:, 6:], net(input_ids=ids[:, :6]).past_key_values).loss  # type: ignore[no-any-return]


def goes_on_without_gradients(net: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        cache = net(input_ids=ids[:, :6]).past_key_values
    return loss_of(net, ids[:, 6:], cache).loss  # type: ignore[no-any-return]


def gives_a_static_one(net: Any, ids: Tensor) -> Tensor:
    return loss_of(net, ids, StaticCache(net.config, max_cache_len=12)).loss  # type: ignore[no-any-return]


class OtherCache(DynamicCache):
    """What a user derives may do anything."""


def gives_another_one(net: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(net, ids, OtherCache()).loss  # type: ignore[no-any-return]


USES: dict[Callable[[Any, Tensor], Tensor], tuple[int, str]] = {
    reads_keys: (1, USED_LATER),
    asks_length: (1, READ_LATER),
    goes_on: (0, ""),
    goes_on_without_gradients: (0, ""),
    gives_a_static_one: (0, HOLDS_ANYTHING.format("StaticCache")),
    gives_another_one: (0, HOLDS_ANYTHING.format("OtherCache")),
}
"""Uses, with the number of attentions that may be cut nevertheless, and why others may not, if that is said."""


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_attention_whose_cache_matters_is_not_cut(use: Callable[[Any, Tensor], Tensor]) -> None:
    number, reason = USES[use]
    found, reasons = scopes_of(Using(use))
    assert len(found) == number
    assert reason in reasons


def test_attentions_that_look_at_another_layer_of_the_cache_are_not_cut() -> None:
    """Those of MPT ask the first layer how long it is."""
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 16}
    net = transformers.MptForCausalLM(transformers.MptConfig(**sizes))
    assert scopes_of(zoo.ZooModule(net, zoo._tokens(96, 12)))[0] == set()


def attention(index: object) -> nn.Module:
    module = nn.Module()
    module.layer_idx = index  # type: ignore[assignment]
    return module


def test_layer_of_a_cache_is_unused_until_it_is_filled() -> None:
    cache, states = DynamicCache(), torch.ones(1, 2, 3, 4)
    assert describe_unused(cache, attention(1)) == "DynamicLayer"
    cache.update(states, states, 1)
    assert describe_unused(cache, attention(0)).startswith("DynamicLayer")
    assert describe_unused(cache, attention(1)) == ""
    assert [describe_unused(cache, attention(index)) for index in (None, "2", -1)] == [""] * 3
    assert describe_unused([cache], attention(2)) == ""
    cache.layers[0].keys = states
    assert describe_unused(cache, attention(0)) == ""
    cache.offloading = True
    assert describe_unused(cache, attention(2)) == ""


def test_copy_of_a_cache_stays_as_it_was() -> None:
    cache, states = DynamicCache(), torch.ones(1, 2, 3, 4)
    cache.update(states, states, 0)
    copied = copy_cache(cache)
    assert copied.layers[0].keys is cache.layers[0].keys
    cache.update(states, states, 0)
    cache.update(states, states, 1)
    assert (len(copied.layers), copied.get_seq_length(), cache.get_seq_length()) == (1, 3, 6)
    assert copy_cache(states) is states


@pytest.mark.parametrize("make", [zoo.llama, lambda: families.build("bart", dropout=0.0)], ids=["llama", "bart"])
def test_block_that_is_recomputed_sees_the_cache_of_its_first_run(make: Callable[[], zoo.ZooModule]) -> None:
    gradients = []
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        module = zoo.with_cache(make())
        batch = module.batch(2)
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][1, 8:] = 0
        if is_recomputed:
            blocks = module.net.model.layers if make is zoo.llama else module.net.model.decoder.layers  # type: ignore[union-attr]
            for block in blocks:  # type: ignore[union-attr]
                checkpoint_block(block)
        module.training_step(batch, 0).backward()
        gradients.append([parameter.grad for parameter in module.parameters() if parameter.grad is not None])
    torch.testing.assert_close(*gradients)
