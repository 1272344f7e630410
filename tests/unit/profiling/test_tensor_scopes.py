"""Operators that may be tensor parallel: what is found in models, and that nothing false is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.planning.spec.tensor import TensorCandidate
from tests.support import families, zoo
from tests.support.models import TinyGPT
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


class GPTLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = TinyGPT()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(input_ids).flatten(0, 1), labels.flatten())


MODELS: dict[str, tuple[Callable[[], zoo.ZooModule], str, dict[str, tuple[str, ...]]]] = {
    "gpt2": (
        zoo.gpt2,
        "net.transformer.h.{}.",
        {"mlp.c_fc mlp.c_proj": (), "attn.c_attn attn.c_proj": ("split_size", "num_heads")},
    ),
    "llama": (
        zoo.llama,
        "net.model.layers.{}.",
        {
            "mlp.gate_proj mlp.up_proj mlp.down_proj": (),
            "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj": (),
        },
    ),
    "bert": (zoo.bert, "net.bert.encoder.layer.{}.", {"intermediate.dense output.dense": ()}),
    "vit": (zoo.vit, "net.vit.layers.{}.", {}),
    "t5": (zoo.t5, "net.encoder.block.{}.layer.1.", {"DenseReluDense.wi DenseReluDense.wo": ()}),
    "neox": (neox, "net.gpt_neox.layers.{}.", {"mlp.dense_h_to_4h mlp.dense_4h_to_h": ()}),
    "opt": (lambda: families.build("opt"), "net.model.decoder.layers.{}.", {"fc1 fc2": ()}),
    "phi3": (lambda: families.build("phi3"), "net.model.layers.{}.", {"mlp.gate_up_proj mlp.down_proj": ()}),
    "qwen2": (lambda: families.build("qwen2"), "net.model.layers.{}.", {"mlp.gate_proj mlp.up_proj mlp.down_proj": ()}),
    "mistral": (
        lambda: families.build("mistral"),
        "net.model.layers.{}.",
        {"mlp.gate_proj mlp.up_proj mlp.down_proj": ()},
    ),
    "TinyGPT": (lambda: zoo.ZooModule(GPTLoss(), zoo._tokens(61, 12)), "net.gpt.blocks.{}.", {"up down": ()}),
}


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
