"""Operators that may be tensor parallel: what is found in models, and that nothing false is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.tensor import TensorCandidate
from lightning_osdp.profiling import tensor_scopes
from lightning_osdp.profiling.tensor_proof import PlayedGroup
from tests.support import families, zoo
from tests.support.traced_models import Regression, trace

WIDTH = 16


def profile_of(module: LightningModule, batch: Any, degrees: tuple[int, ...] = (2,)) -> ModelProfile:
    size = len(batch if isinstance(batch, Tensor) else next(iter(batch.values())))
    return trace(module, batch, size, device=torch.device("cpu"), tensor_degrees=degrees).model_profile


def profile_of_net(net: nn.Module, *shape: int, degrees: tuple[int, ...] = (2,)) -> ModelProfile:
    return profile_of(Regression(net), torch.randn(4, *(shape or (3, WIDTH))), degrees)


def groups(profile: ModelProfile) -> dict[str, TensorCandidate]:
    """The candidates of several operators, by the names of these."""
    found = {each.operators: each for each in profile.tensor_candidates if len(each.operators) > 1}
    return {" ".join(names): each for names, each in found.items()}


# -- models ------------------------------------------------------------------------------------------------------------


def neox() -> zoo.ZooModule:
    config = transformers.GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=12,
        use_cache=False,
    )
    return zoo.ZooModule(transformers.GPTNeoXForCausalLM(config), zoo._tokens(64, 12))


def _gated(mlp: str) -> str:
    return f"{mlp}.gate_proj {mlp}.up_proj {mlp}.down_proj"


MODELS: dict[str, tuple[Callable[[], zoo.ZooModule], str]] = {
    "gpt2": (zoo.gpt2, "net.transformer.h.{0}.mlp.c_fc net.transformer.h.{0}.mlp.c_proj"),
    "llama": (zoo.llama, _gated("net.model.layers.{0}.mlp")),
    "bert": (zoo.bert, "net.bert.encoder.layer.{0}.intermediate.dense net.bert.encoder.layer.{0}.output.dense"),
    "vit": (zoo.vit, "net.vit.layers.{0}.mlp.fc1 net.vit.layers.{0}.mlp.fc2"),
    "t5": (zoo.t5, "net.encoder.block.{0}.layer.1.DenseReluDense.wi net.encoder.block.{0}.layer.1.DenseReluDense.wo"),
    "t5 decoder": (
        zoo.t5,
        "net.decoder.block.{0}.layer.2.DenseReluDense.wi net.decoder.block.{0}.layer.2.DenseReluDense.wo",
    ),
    "neox": (neox, "net.gpt_neox.layers.{0}.mlp.dense_h_to_4h net.gpt_neox.layers.{0}.mlp.dense_4h_to_h"),
    "opt": (lambda: families.build("opt"), "net.model.decoder.layers.{0}.fc1 net.model.decoder.layers.{0}.fc2"),
    "phi3": (
        lambda: families.build("phi3"),
        "net.model.layers.{0}.mlp.gate_up_proj net.model.layers.{0}.mlp.down_proj",
    ),
    "qwen2": (lambda: families.build("qwen2"), _gated("net.model.layers.{0}.mlp")),
    "mistral": (lambda: families.build("mistral"), _gated("net.model.layers.{0}.mlp")),
    "TinyGPT": (zoo.tiny_gpt, "net.gpt.blocks.{0}.up net.gpt.blocks.{0}.down"),
    "encoder": (zoo.encoder, "net.body.layers.{0}.linear1 net.body.layers.{0}.linear2"),
}

ATTENTIONS: dict[str, tuple[str, tuple[str, ...], int]] = {
    "gpt2": ("net.transformer.h.{0}.attn", ("split_size",), 3),
    "llama": ("net.model.layers.{0}.self_attn", (), 1),
    "bert": ("net.bert.encoder.layer.{0}.attention.self", (), 1),
    "vit": ("net.vit.layers.{0}.attention", (), 1),
    "neox": ("net.gpt_neox.layers.{0}.attention", (), 1),
    "opt": ("net.model.decoder.layers.{0}.self_attn", ("num_heads",), 1),
}
"""Scope, attributes that have to be divided, and parts of the fused projection."""


@pytest.fixture(scope="module")
def profiles() -> Callable[[str], ModelProfile]:
    """Profiles of the models, each traced once."""

    @functools.cache
    def build(name: str) -> ModelProfile:
        torch.manual_seed(0)
        module = MODELS[name][0]()
        return profile_of(module, module.batch(4), (2, 4))

    return build


@pytest.mark.parametrize("name", MODELS)
def test_mlps_of_every_block_are_found_for_both_degrees(name: str, profiles: Callable[[str], ModelProfile]) -> None:
    found = groups(profiles(name))
    for block in range(2):
        pair = found[MODELS[name][1].format(block)]
        assert pair.degrees == (2, 4)
        assert pair.scope == pair.operators[-1]
        assert (pair.attributes, pair.needs_agreement) == ((), False)
        assert pair.parts == ((2, 1) if name == "phi3" else (1,) * len(pair.operators))
        assert 0 < pair.output_bytes == pair.input_bytes  # rows of the model's width


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_are_found_as_scopes_with_what_has_to_be_divided(
    name: str, profiles: Callable[[str], ModelProfile]
) -> None:
    scope, attributes, parts = ATTENTIONS[name]
    for block in range(2):
        own = scope.format(block)
        (found,) = (each for each in groups(profiles(name)).values() if each.scope == own)
        assert found.attributes == tuple(f"{own}.{attribute}" for attribute in attributes)
        assert found.parts == (*[parts] * (len(found.operators) - 1), 1)
        assert (found.needs_agreement, found.degrees[0]) == (True, 2)


def test_attention_whose_position_bias_goes_to_later_blocks_is_no_scope(
    profiles: Callable[[str], ModelProfile],
) -> None:
    scopes = {each.scope for each in groups(profiles("t5")).values()}
    assert not any(scope is not None and scope.endswith("Attention") for scope in scopes)


def test_attention_of_torch_is_a_candidate_by_itself(profiles: Callable[[str], ModelProfile]) -> None:
    found = [each for each in profiles("encoder").tensor_candidates if each.roles == ("attention",)]
    assert [each.operators for each in found] == [(f"net.body.layers.{block}.self_attn",) for block in range(2)]
    for each in found:
        assert (each.scope, each.degrees) == (None, (2,))  # it has two heads
        assert 0 < each.input_bytes == each.output_bytes  # what is query, key and value at once is gathered once


# -- nothing false -----------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two Linears, with something in between and after them."""

    def __init__(self, *steps: str, after: str = "", hidden: int = 24, out: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, out)
        self.slope = nn.Parameter(torch.tensor([0.25]))
        self.register_buffer("seen", torch.zeros(()))
        self.steps, self.after, self.calls = steps, after, 0

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.up(x)
        for step in self.steps:
            h = {**RIGHT, **WRONG, **NEEDS_SAMPLES}[step](self, h, x)
        y = self.down(h)
        return AFTER[self.after](self, y, first, x)


def write_buffer(net: Between, h: Tensor, x: Tensor) -> Tensor:
    net.seen += h.detach().sum()
    return h


def count_calls(net: Between, h: Tensor, x: Tensor) -> Tensor:
    net.calls += 1
    return h * (1 + net.calls % 2)


def remember(net: Between, h: Tensor, x: Tensor) -> Tensor:
    net.last = h
    return h


Step = Callable[[Between, Tensor, Tensor], Tensor]

RIGHT: dict[str, Step] = {
    "relu": lambda net, h, x: F.relu(h),
    "relu_": lambda net, h, x: (h * 2).relu_(),
    "gelu": lambda net, h, x: F.gelu(h, approximate="tanh"),
    "silu times itself": lambda net, h, x: F.silu(h) * h,
    "dropout": lambda net, h, x: F.dropout(h, 0.3),
    "clamp": lambda net, h, x: h.clamp(-1, 1),
    "leaky": lambda net, h, x: F.leaky_relu(h, 0.1) * 1.5 + 0.5,
    "prelu": lambda net, h, x: F.prelu(h, net.slope),
    "flatten": lambda net, h, x: F.mish(h.reshape(-1, h.shape[-1])).view(h.shape),
    "cast": lambda net, h, x: h.to(torch.float32).sigmoid().to(x.dtype) + h,
}

WRONG: dict[str, Step] = {
    "layer norm": lambda net, h, x: F.layer_norm(h, h.shape[-1:]),
    "rms norm": lambda net, h, x: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6),
    "length": lambda net, h, x: F.normalize(h, dim=-1),
    "softmax": lambda net, h, x: h.softmax(-1) * 8,
    "minus mean": lambda net, h, x: h - h.mean(-1, keepdim=True),
    "a little of the mean": lambda net, h, x: h + 1e-4 * h.mean(-1, keepdim=True),
    "sum of all": lambda net, h, x: h + h.sum() / 100,
    "mean of large ones": lambda net, h, x: torch.where(h > 50, h.mean(-1, keepdim=True), h),
    "cumsum": lambda net, h, x: h.cumsum(-1),
    "flip": lambda net, h, x: h.flip(-1),
    "roll": lambda net, h, x: h.roll(1, -1),
    "sort": lambda net, h, x: h.sort(-1).values,
    "swap halves": lambda net, h, x: torch.cat(h.chunk(2, -1)[::-1], -1),
    "position": lambda net, h, x: h * torch.arange(h.shape[-1]),
    "width": lambda net, h, x: h / h.shape[-1],
    "batch size": lambda net, h, x: h / len(h),
    "number of elements": lambda net, h, x: h / h.numel(),
    "mean of the batch": lambda net, h, x: h - h.mean(0, keepdim=True),
    "own number": lambda net, h, x: h * x.mean(),
    "own first token": lambda net, h, x: h + x[:1, :1, :1],
    "shared input": lambda net, h, x: h + x.repeat(1, 1, 3)[..., : h.shape[-1]],
    "buffer": write_buffer,
    "state": count_calls,
    "memory": remember,
    "host": lambda net, h, x: h * h.detach().mean().item(),
    "noise": lambda net, h, x: h + torch.randn(h.shape[-1]),
    "top features": lambda net, h, x: h * (h >= h.kthvalue(3, -1, keepdim=True).values),
    "straight through": lambda net, h, x: h + (h.mean(-1, keepdim=True) - h).detach(),
    "zero": lambda net, h, x: h * 0,
}

NEEDS_SAMPLES: dict[str, Step] = {
    "over tokens": lambda net, h, x: h.softmax(1),
    "own row": lambda net, h, x: h * x.mean(-1, keepdim=True),
}
"""What is right just if whole samples are gathered, and all that the module is given."""

AFTER: dict[str, Callable[[Between, Tensor, Tensor, Tensor], Tensor]] = {
    "": lambda net, y, h, x: y,
    "residual of the input": lambda net, y, h, x: y + x,
    "norm": lambda net, y, h, x: F.layer_norm(y, y.shape[-1:]),
    "hidden mean": lambda net, y, h, x: y + h.mean(-1, keepdim=True),
    "hidden penalty": lambda net, y, h, x: y + h.pow(2).mean(),
    "hidden sign": lambda net, y, h, x: y * (h.detach().mean() > 0),
    "hidden again": lambda net, y, h, x: y + net.down(h),
    "hidden of a slice": lambda net, y, h, x: y + h[..., : y.shape[-1]],
}
RIGHT_AFTER = ("", "residual of the input", "norm")


@pytest.mark.parametrize("step", RIGHT)
def test_pair_with_features_apart_is_found(step: str) -> None:
    assert list(groups(profile_of_net(Between(step)))) == ["net.up net.down"]


def test_modules_that_run_between_the_operators_are_named() -> None:
    net = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Sequential(nn.GELU(), nn.Dropout(0.1)), nn.Linear(32, WIDTH), nn.ReLU()
    )
    assert groups(profile_of_net(net))["net.0 net.2"].inner_modules == ("net.1", "net.1.0", "net.1.1")
    assert groups(profile_of_net(Between("gelu")))["net.up net.down"].inner_modules == ()


@pytest.mark.parametrize("step", WRONG)
def test_pair_with_something_mixed_in_between_is_not_found(step: str) -> None:
    profile = profile_of_net(Between(step))
    assert not groups(profile)
    assert {name for each in profile.tensor_candidates for name in each.operators} == {"net.up", "net.down"}


@pytest.mark.parametrize("step", NEEDS_SAMPLES)
def test_module_that_needs_whole_samples_is_found_as_scope(step: str) -> None:
    (found,) = groups(profile_of_net(Between(step))).values()
    assert (found.scope, found.needs_agreement) == ("net", True)
    assert not groups(profile_of_net(Between(step, after="residual of the input")))


@pytest.mark.parametrize("after", AFTER)
def test_pair_whose_hidden_tensor_is_used_after_it_is_not_found(after: str) -> None:
    assert bool(groups(profile_of_net(Between("gelu", after=after)))) == (after in RIGHT_AFTER)


@settings(max_examples=40, derandomize=True)
@given(
    st.lists(st.sampled_from([*RIGHT] * 3 + [*WRONG]), max_size=4),
    st.sampled_from([*RIGHT_AFTER] * 3 + [*AFTER]),
    st.sampled_from([16, 24, 48]),
)
def test_pair_is_found_just_if_nothing_mixes_features_or_reads_them_elsewhere(
    steps: list[str], after: str, hidden: int
) -> None:
    is_right = after in RIGHT_AFTER and all(step in RIGHT for step in steps)
    found = groups(profile_of_net(Between(*steps, after=after, hidden=hidden)))
    assert bool(found) == is_right


class Attention(nn.Module):
    """Attention with divided heads, and something that must not be cut along."""

    def __init__(self, flaw: str = "", heads: int = 4) -> None:
        super().__init__()
        self.flaw, self.heads = flaw, heads
        self.qkv, self.out = nn.Linear(WIDTH, 12 * heads), nn.Linear(4 * heads, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        heads = (t.view(len(x), -1, self.heads, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, v = heads
        scores = q @ k.transpose(-1, -2) / 2
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        if self.flaw == "over heads":
            weights = weights / weights.sum(1, keepdim=True)
        if self.flaw == "buffer":
            self.seen += weights.detach().mean()
        if self.flaw == "moved":
            self.seen.to(torch.float64)
        if self.flaw == "rare":
            weights = torch.where(weights > 1e6, weights.mean(1, keepdim=True), weights)
        y = (weights @ v).transpose(1, 2).flatten(2)
        y = self.out(y * x.mean(-1, keepdim=True) if self.flaw == "gate" else y)
        if self.flaw == "residual":
            return y + x
        return (y, weights) if self.flaw == "weights" else (y, x) if self.flaw == "returns x" else y


class RowRecomputed(nn.Module):
    """Recomputes its last operator in a way that hands no object on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.down(torch.tanh(h)), F.gelu(self.up(x)), use_reentrant=True)


class Kept:
    """An object that tensors are kept in."""

    def __init__(self) -> None:
        self.kept = [torch.zeros(())]


class WithKept(nn.Module):
    """An attention that gets an object, in a block that gets it as well and has an MLP of its own."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.up, self.down = attention, nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, kept: Kept) -> Tensor:
        x = x + self.attention(F.layer_norm(x, x.shape[-1:]), kept)
        return x + self.down(F.gelu(self.up(x)))


class KeepingAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor, kept: Kept) -> Any:
        kept.kept.append(self.inner.qkv(x))
        return self.inner.out((kept.kept[-1][..., :WIDTH] * x.mean(-1, keepdim=True)).softmax(1))


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = WithKept(KeepingAttention())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, Kept())  # type: ignore[no-any-return]


def test_object_that_may_hold_tensors_hinders_what_gets_it_and_no_pair_beside() -> None:
    profile = profile_of_net(Keeping())
    assert list(groups(profile)) == ["net.block.up net.block.down"]
    reason = profile.tensor_group_refusals["net.block.attention.inner.qkv"]
    assert reason == "together with out: an argument is a Kept, which may hold anything"


class AttentionBlock(nn.Module):
    def __init__(self, flaw: str = "", heads: int = 4) -> None:
        super().__init__()
        self.attention, self.flaw = Attention(flaw, heads), flaw
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:])
        masks = {"own mask": h.mean((0, 2)), "own number": h.mean(), "sample mask": h.mean(-1)[:, None, None]}
        mask = masks.get(self.flaw)
        out = self.attention(h * self.scale, mask)
        y, more = out if isinstance(out, tuple) else (out, None)
        return x + y + (0 if more is None else more.mean())


@pytest.mark.parametrize("flaw", ["", "gate", "sample mask", "moved"])
def test_attention_whose_heads_can_be_divided_is_a_scope(flaw: str) -> None:
    (found,) = groups(profile_of_net(AttentionBlock(flaw))).values()
    assert (found.scope, found.attributes, found.parts) == ("net.attention", ("net.attention.heads",), (3, 1))


class SampleCounting(AttentionBlock):
    """Refuses other numbers of samples than those that it is traced with."""

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) in (2, 8)
        return super().forward(x)


def test_attention_in_a_module_that_refuses_other_numbers_of_samples_is_a_scope() -> None:
    assert [each.scope for each in groups(profile_of_net(SampleCounting())).values()] == ["net.attention"]


@pytest.mark.parametrize("flaw", ["over heads", "buffer", "rare", "residual", "weights", "returns x", "own mask"])
def test_attention_that_must_see_all_heads_or_its_own_samples_is_no_scope(flaw: str) -> None:
    assert not groups(profile_of_net(AttentionBlock(flaw)))


GROUPS_REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "norm": (
        lambda: Between("layer norm"),
        (2,),
        "net.up",
        "together with down: native_layer_norm in between computes with several features of a row",
    ),
    "state": (lambda: Between("state"), (2,), "net.down", "together with up: Between changes its own state"),
    "used again": (
        lambda: Between("gelu", after="hidden mean"),
        (2,),
        "net.up",
        "together with down: it is used again later",
    ),
    "features": (
        lambda: Between("gelu", hidden=27),
        (2,),
        "net.down",
        "together with up: 2 does not divide features = 27",
    ),
    "heads": (
        lambda: AttentionBlock(heads=3),
        (2,),
        "net.attention.qkv",
        "together with out: 2 does not divide heads = 3",
    ),
    "over heads": (
        lambda: AttentionBlock("over heads"),
        (2,),
        "net.attention.out",
        "together with qkv: bmm in between computes with several features of a row",
    ),
    "residual": (
        lambda: AttentionBlock("residual"),
        (2,),
        "net.attention.out",
        "together with qkv: its arguments are used after the row",
    ),
    "recomputed": (
        RowRecomputed,
        (2,),
        "net.down",
        "together with up: it is recomputed by reentrant checkpointing, or runs without gradients",
    ),
}


@pytest.mark.parametrize("case", GROUPS_REFUSED)
def test_reason_why_operators_do_not_run_together_is_kept_for_each(case: str) -> None:
    make, degrees, operator, reason = GROUPS_REFUSED[case]
    profile = profile_of_net(make(), degrees=degrees)
    assert profile.tensor_group_refusals[operator] == reason
    assert not profile_of_net(Between("gelu")).tensor_group_refusals


def test_reason_is_kept_for_operators_of_the_module_itself() -> None:
    class Direct(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.down(F.softmax(self.up(batch), -1)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    reasons = profile_of(Direct(), torch.randn(4, 3, WIDTH)).tensor_group_refusals
    assert reasons["up"] == "together with down: _softmax in between computes with several features of a row"


class Twice(nn.Module):
    """An MLP and a head run twice; with a flaw, the MLP's features are mixed in a third run."""

    def __init__(self, flaw: bool = False) -> None:
        super().__init__()
        self.mlp, self.head, self.flaw = Between("gelu"), nn.Linear(WIDTH, WIDTH), flaw

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.mlp(x), self.mlp(x.flip(1))
        if self.flaw:
            second = self.mlp.down(self.mlp.up(x).softmax(-1))
        return self.head(first.softmax(-1)) * self.head(second.softmax(-1))


def test_operators_that_run_twice_are_candidates_with_the_bytes_of_both_runs() -> None:
    once, twice = profile_of_net(nn.Sequential(Between("gelu"))), profile_of_net(Twice())
    assert list(groups(twice)) == ["net.mlp.up net.mlp.down"]
    (pair,), (expected,) = groups(twice).values(), groups(once).values()
    assert pair.input_bytes == 2 * expected.input_bytes
    (head,) = (each for each in twice.tensor_candidates if each.operators == ("net.head",))
    assert head.input_bytes == pair.input_bytes
    operator = next(each for each in twice.operators if each.name == "net.head")
    assert (operator.calls, operator.unsplittable_reason) == (2, "it runs 2 times in a step")
    assert not groups(profile_of_net(Twice(flaw=True)))


class Penalized(nn.Module):
    """The gradient of what goes into a frozen and a trained operator is part of the result, that of a third is not."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.frozen(self.trained(x)).tanh().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return self.other(x) + gradient


def test_operators_whose_gradients_are_differentiated_again_are_refused() -> None:
    profile = profile_of_net(Penalized())
    assert [each.operators for each in profile.tensor_candidates] == [("net.other",)]
    reason = "a gradient that depends on it is differentiated again"
    assert profile.tensor_refusals == {"net.trained": reason, "net.frozen": reason}


def compiled_in_place() -> nn.Module:
    module = nn.GELU()
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize("make", [lambda: torch.compile(nn.GELU(), backend="eager"), compiled_in_place])
def test_pair_with_a_compiled_module_in_between_is_not_found_though_others_alike_are(make: Any) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)))
    net.append(nn.Sequential(nn.Linear(WIDTH, 24), make(), nn.Linear(24, WIDTH)))
    profile = profile_of_net(net)
    assert list(groups(profile)) == ["net.0.0 net.0.2"]
    assert profile.tensor_group_refusals["net.1.0"] == "together with 2: net.1.1 is compiled by torch.compile"


def test_heads_that_the_smallest_degree_does_not_divide_are_cut_by_another_one() -> None:
    (found,) = groups(profile_of_net(AttentionBlock(heads=3), degrees=(2, 3, 6))).values()
    assert found.degrees == (3,)


def test_block_after_block_is_no_refused_pair() -> None:
    net = Stack(2)
    net.layers[0].steps = ("layer norm",)
    assert set(profile_of_net(net).tensor_group_refusals) == {"net.layers.0.up", "net.layers.0.down"}


# -- how it is looked for ----------------------------------------------------------------------------------------------


class Stack(nn.Module):
    def __init__(self, layers: int, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Between("gelu", **options) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.layer_norm(x + layer(x), x.shape[-1:])
        return x


@pytest.fixture
def played_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each group that is played."""
    counted: list[int] = []

    class Counted(PlayedGroup):
        def __init__(self, *args: Any) -> None:
            counted.append(1)
            super().__init__(*args)

    monkeypatch.setattr(tensor_scopes, "PlayedGroup", Counted)
    return counted


def test_blocks_that_do_the_same_are_proven_once(played_groups: list[int]) -> None:
    net = Stack(24)
    net.layers[7].steps = ("silu times itself",)
    assert len(groups(profile_of_net(net))) == 24
    assert len(played_groups) == 2


def test_forty_eight_blocks_alike_are_found_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_scopes, "MAX_SECONDS", 1.0)  # of processor time, after which none is played
    model = zoo.llama(width=64, layers=48, num_attention_heads=4)
    profile = profile_of(model, model.batch(4), (2, 4))
    assert len(groups(profile)) == 2 * 48
    assert not profile.tensor_group_refusals


class GatedByOne(nn.Module):
    """Another linear layer gives a number for each row, which none of the ranks has whole features for."""

    def __init__(self, plan: dict[str, str] | None) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 1), nn.Linear(24, WIDTH)
        self._tp_plan = plan

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * self.gate(x))


@pytest.mark.parametrize(
    ("steps", "plan", "is_found"),
    [
        ((), None, False),
        ((), {"up": "colwise", "down": "rowwise"}, True),
        ((), {"gate": "colwise", "down": "rowwise"}, False),
        (("layer norm",), {"up": "colwise", "down": "rowwise"}, False),
    ],
)
def test_plans_of_transformers_are_tried_and_not_trusted(
    steps: tuple[str, ...], plan: dict[str, str] | None, is_found: bool
) -> None:
    net: nn.Module = Between(*steps) if steps else GatedByOne(plan)
    net.__dict__["_tp_plan"] = plan
    assert list(groups(profile_of_net(nn.Sequential(net)))) == ["net.0.up net.0.down"] * is_found


def test_pair_with_a_hook_in_between_is_not_found_though_others_alike_are() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(3)]
    _hooked(layers[1][1])
    net = Stack(0)
    net.layers.extend(layers)
    assert list(groups(profile_of_net(net))) == ["net.layers.0.0 net.layers.0.2", "net.layers.2.0 net.layers.2.2"]


def test_attentions_that_do_the_same_are_proven_once(played_groups: list[int]) -> None:
    module = zoo.gpt2(layers=4)
    assert len(groups(profile_of(module, module.batch(4)))) == 8
    assert len(played_groups) == 2


class Inner(nn.Module):
    """A linear layer, and something before or after it."""

    def __init__(self, layer: nn.Linear, before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.before, self.after = layer, before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(self.before(x)))


@pytest.mark.parametrize(("hooked", "is_found"), [("0.0", False), ("0.1", False), ("0", True), ("0.1.layer", False)])
def test_hook_that_would_see_a_slice_hinders_a_pair_and_one_around_it_does_not(hooked: str, is_found: bool) -> None:
    up, down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
    net = nn.Sequential(nn.Sequential(Inner(up, F.relu, F.gelu), Inner(down, torch.tanh, F.relu)))
    assert list(groups(profile_of_net(net))) == ["net.0.0.layer net.0.1.layer"]
    _hooked(net.get_submodule(hooked))
    assert bool(groups(profile_of_net(net))) == is_found


def test_finding_leaves_module_and_random_state_as_they_were() -> None:
    net = Between("dropout")
    module, batch = Regression(net), torch.randn(4, 3, WIDTH)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert groups(profile_of(module, batch))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert (net.calls, vars(net.up).keys()) == (0, vars(nn.Linear(1, 1)).keys())


def test_pair_on_the_meta_device_is_found() -> None:
    with torch.device("meta"):
        net = Between("gelu", hidden=4096)
    assert list(groups(profile_of_net(net))) == ["net.up net.down"]


@pytest.mark.parametrize("tokens", [12, WIDTH])
def test_pair_of_long_sequences_is_played_on_short_ones(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_scopes, "MAX_ELEMENTS", 0)
    assert list(groups(profile_of_net(Between("gelu"), tokens, WIDTH))) == ["net.up net.down"]
    assert not groups(profile_of_net(Between("gelu"), 3, WIDTH))


def test_no_pair_is_claimed_if_there_is_no_time_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_scopes, "MAX_SECONDS", 0.0)
    profile = profile_of_net(Between("gelu"))
    assert [each.operators for each in profile.tensor_candidates] == [("net.up",), ("net.down",)]


def test_blocks_alike_are_found_after_the_time_is_over(
    played_groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(process_time=lambda: 1e9 * (len(played_groups) > 1))
    monkeypatch.setattr(tensor_scopes, "time", clock)
    net = Stack(4)
    net.layers[1].steps = ("silu times itself",)
    assert list(groups(profile_of_net(net))) == [f"net.layers.{at}.up net.layers.{at}.down" for at in (0, 2, 3)]


def test_degrees_are_those_that_divide_the_features() -> None:
    profile = profile_of_net(Between("gelu", hidden=12), degrees=(2, 3, 4, 5))
    assert groups(profile)["net.up net.down"].degrees == (2, 3, 4)


def test_fused_gate_is_cut_in_both_halves() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both, self.down = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.glu(self.both(x)))

    (found,) = groups(profile_of_net(Gated())).values()
    assert (found.operators, found.parts) == (("net.both", "net.down"), (2, 1))


def test_pair_in_the_training_step_itself_is_found() -> None:
    class Plain(Regression):
        def __init__(self) -> None:
            super().__init__(nn.Identity())
            self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            hidden = F.gelu(self.up(batch))
            self.log("loss", 1.0)
            return self.down(hidden).square().mean()

    assert list(groups(profile_of(Plain(), torch.randn(4, WIDTH)))) == ["up down"]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hook(module: nn.Module, *_: Any) -> None:
    """Sees what goes in and comes out."""


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hooked": (lambda: _hooked(nn.Linear(WIDTH, 8)), "hooks"),
    "own forward": (lambda: Doubled(WIDTH, 8), "forward"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 8)), "weight is computed"),
    "indivisible": (lambda: nn.Linear(WIDTH, 9), "9 output features"),
}


def _hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(hook)
    return module


@pytest.mark.parametrize("case", REFUSED)
def test_operator_that_cannot_be_cut_is_refused_with_the_reason(case: str) -> None:
    make, reason = REFUSED[case]
    profile = profile_of_net(nn.Sequential(make()))
    assert not profile.tensor_candidates
    if case != "parametrized":
        assert reason in profile.tensor_refusals["net.0"]


class Lookup(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Focus(nn.Module):
    """Calls an attention of torch."""

    def __init__(self, attention: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.attention, self.call = attention, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.attention, x)[0]


class DoubledAttention(nn.MultiheadAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def attention(heads: int = 4, **options: Any) -> nn.MultiheadAttention:
    return nn.MultiheadAttention(WIDTH, heads, batch_first=True, **options)


def _tied_attention() -> nn.Module:
    net = attention(kdim=8, vdim=8)
    net.k_proj_weight = net.v_proj_weight
    return net


def _attend(net: nn.Module, x: Tensor, **options: Any) -> Any:
    return net(x, x, x, **options)


FOCUSES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Tensor], Any], str]] = {
    "plain": (attention, _attend, ""),
    "causal": (attention, lambda net, x: _attend(net, x, attn_mask=torch.ones(3, 3).triu(1).bool()), ""),
    "odd heads": (lambda: attention(heads=1), _attend, "its 1 heads can't be divided by 2"),
    "own forward": (lambda: DoubledAttention(WIDTH, 4), _attend, "its forward is replaced"),
    "bias of keys": (lambda: attention(add_bias_kv=True), _attend, "add_bias_kv"),
    "zeros": (lambda: attention(add_zero_attn=True), _attend, "add_zero_attn"),
    "hooked": (lambda: _hooked(attention()), _attend, "hooks"),
    "weights of each head": (
        attention,
        lambda net, x: _attend(net, x, average_attn_weights=False),
        "it returns the weights of each head",
    ),
    "mask of each head": (
        attention,
        lambda net, x: _attend(net, x, attn_mask=torch.zeros(4 * len(x), 3, 3)),
        "its mask has other numbers for each head",
    ),
    "one sequence": (attention, lambda net, x: _attend(net, x[0]), "without a dimension for samples"),
    "shared": (_tied_attention, lambda net, x: net(x, x[..., :8], x[..., 8:]), "its projections share a weight"),
}


@pytest.mark.parametrize("case", FOCUSES)
def test_attention_of_torch_is_a_candidate_unless_it_does_more_than_is_known(case: str) -> None:
    make, call, reason = FOCUSES[case]
    profile = profile_of_net(Focus(make(), call))
    if reason:
        assert reason in profile.tensor_refusals["net.attention"]
        assert not profile.tensor_candidates
    else:
        (found,) = profile.tensor_candidates
        assert (found.roles, found.degrees) == (("attention",), (2,))


TABLES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "embedding": (lambda: nn.Embedding(50, 8, padding_idx=0), ""),
    "narrow": (lambda: nn.Embedding(50, 1), ""),
    "odd": (lambda: nn.Embedding(51, 7), "its 7 columns can't be divided by 2"),
    "bag": (lambda: nn.EmbeddingBag(50, 8, mode="sum"), ""),
    "max_norm": (lambda: nn.Embedding(50, 8, max_norm=1.0), "weights are changed"),
    "bag of sparse gradients": (lambda: nn.EmbeddingBag(50, 8, mode="sum", sparse=True), "sparse"),
    "frequency": (lambda: nn.Embedding(50, 8, scale_grad_by_freq=True), "scale_grad_by_freq"),
    "hooked bag": (lambda: _hooked(nn.EmbeddingBag(50, 8)), "hooks"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_are_candidates_unless_their_rows_matter(case: str) -> None:
    make, reason = TABLES[case]
    profile = profile_of(Regression(Lookup(make())), torch.randint(0, 50, (4, 6)))
    if reason:
        assert reason in profile.tensor_refusals["net.table"]
        assert not profile.tensor_candidates
    else:
        (found,) = profile.tensor_candidates
        role = "table_rows" if case == "narrow" else "embedding"
        assert (found.roles, found.scope, found.input_bytes) == ((role,), None, 48)
