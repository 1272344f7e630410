"""The models that are compared: the paper's three families, transformers' GPT-2 and a LLaMA-like one.

The paper's families (section 4.1) are narrow and deep, wide and shallow, and inconsistent widths one after the other,
here scaled to ranks of one core each. GPT-2 and LLaMA are built from their configurations, with random weights; their
vocabulary is scaled with their width, so that embeddings keep about the share of the parameters that they have in the
published models. Every model reads bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Model:
    """One model of the comparison."""

    name: str
    family: str
    tokens: int
    """Per sample."""
    build: Callable[[], nn.Module]
    """Tokens (B, T) -> logits (B, T, V)."""
    replicated_fits: bool = True
    """Whether the largest memory limit is one under which the model can be replicated."""


class Block(nn.Module):
    """Causal self-attention, then an MLP, both behind a norm: the example's block, whose file imports lightning_osdp.
    That takes 10 MiB, which is no other system's to pay."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)  # (B, H, T, C / H)
        x = x + self.project(attended.transpose(1, 2).flatten(2))  # (B, T, C)
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


class Decoder(nn.Module):
    """A GPT whose blocks may have different widths, with a projection wherever the width changes."""

    def __init__(self, widths: tuple[int, ...], tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, widths[0])
        self.positions = nn.Embedding(tokens, widths[0])
        bridges = (nn.Linear(a, b, bias=False) if a != b else nn.Identity() for a, b in pairwise((*widths, widths[-1])))
        self.blocks = nn.ModuleList(Block(width) for width in widths)
        self.bridges = nn.ModuleList(bridges)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))  # (B, T, C)
        for block, bridge in zip(self.blocks, self.bridges, strict=True):
            x = bridge(block(x))
        return self.head(self.norm(x))  # (B, T, 256)


class Logits(nn.Module):
    """A causal language model of transformers, as tokens -> logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def gpt2(layers: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=width // 64, n_positions=128, vocab_size=vocabulary, use_cache=False
    )
    config.bos_token_id = config.eos_token_id = 0
    return Logits(GPT2LMHeadModel(config))


def llama(layers: int, width: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=width * 43 // 16,  # 11008 / 4096 of LLaMA 7B
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return Logits(LlamaForCausalLM(config))


class Task(pl.LightningModule):
    """Next-byte prediction with AdamW: the same LightningModule for every system.

    Args:
        net: tokens -> logits.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = next_byte_loss(self(batch[:, :-1]), batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def next_byte_loss(logits: Tensor, batch: Tensor) -> Tensor:
    """Mean cross-entropy. ``logits``: (B, T, V), ``batch``: (B, T + 1)."""
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """The one optimizer of this benchmark, in the form that OSDP would choose: every system gets it."""
    return torch.optim.AdamW(module.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def block_classes(module: nn.Module) -> set[type[nn.Module]]:
    """The classes of the repeated blocks: what users name in a wrapping policy or a checkpointing policy."""
    return {
        type(child) for m in module.modules() if isinstance(m, nn.ModuleList) for child in m if _has_weights(child)
    } - {nn.Linear, nn.ModuleList}


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _decoder(name: str, family: str, widths: tuple[int, ...], tokens: int = 64, **more: bool) -> Model:
    return Model(name, family, tokens, lambda: Decoder(widths, tokens), **more)


N_AND_D, W_AND_S, I_AND_C, GPT2, LLAMA = "N&D", "W&S", "I&C", "GPT-2", "LLaMA"
PAPERS_FAMILIES = (N_AND_D, W_AND_S, I_AND_C)
FAMILIES = (*PAPERS_FAMILIES, GPT2, LLAMA)

MODELS = {
    model.name: model
    for model in (
        _decoder("nd-small", N_AND_D, (256,) * 24),  # 19 M
        _decoder("nd-large", N_AND_D, (384,) * 32, replicated_fits=False),  # 57 M
        _decoder("ws-small", W_AND_S, (768,) * 3),  # 21 M
        _decoder("ws-large", W_AND_S, (1280,) * 3, replicated_fits=False),  # 59 M
        _decoder("ic-small", I_AND_C, (256,) * 4 + (512,) * 3 + (768,) * 2),  # 27 M
        _decoder("ic-large", I_AND_C, (384,) * 4 + (768,) * 4 + (1152,) * 2, replicated_fits=False),  # 68 M
        Model("gpt2", GPT2, 64, lambda: gpt2(8, 384, 16384)),  # 21 M, of which 30 % are the tied embedding
        Model("llama", LLAMA, 64, lambda: llama(8, 512, 4096)),  # 27 M
        _decoder("nd-quick", N_AND_D, (192,) * 16, 32),  # 7 M
        _decoder("ws-quick", W_AND_S, (640,) * 2, 32),  # 10 M
        _decoder("ic-quick", I_AND_C, (192,) * 4 + (384,) * 2 + (576,) * 1, 32),  # 9 M
        Model("gpt2-quick", GPT2, 32, lambda: gpt2(6, 320, 8192)),  # 10 M
        Model("llama-quick", LLAMA, 32, lambda: llama(8, 256, 4096)),  # 8 M
        _decoder("nd-gpu", N_AND_D, (1024,) * 24, 256),  # 303 M
        _decoder("ws-gpu", W_AND_S, (4096,) * 3, 256),  # 606 M
        _decoder("ic-gpu", I_AND_C, (1024,) * 8 + (2048,) * 4 + (3072,) * 2, 256),  # 537 M
        Model("gpt2-gpu", GPT2, 128, lambda: gpt2(24, 1024, 50257)),  # 354 M, GPT-2 medium
        Model("llama-gpu", LLAMA, 256, lambda: llama(16, 2048, 32000), replicated_fits=False),
    )
}
QUICK_MODELS = ("nd-quick", "ws-quick", "ic-quick")
GPU_MODELS = tuple(name for name in MODELS if name.endswith("-gpu"))
FULL_MODELS = tuple(name for name in MODELS if not name.endswith(("-quick", "-gpu")))


def build(name: str, kind: type[Task] = Task) -> Task:
    """The model, with the same weights on every rank."""
    torch.manual_seed(1)
    return kind(MODELS[name].build())
