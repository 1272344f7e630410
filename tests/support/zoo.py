"""A zoo of architectures with random weights, small by default: models of ``transformers`` and of plain torch.

Each function gives a ``ZooModule`` and takes its sizes, so that the tests read them tiny and the benchmarks larger.
Dropout is 0 everywhere: training on several ranks must equal training on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.support.models import LENGTH, VOCABULARY, Block, TinyGPT

OptimizerOf = Callable[[LightningModule], Any]
Batch = dict[str, Tensor]


def adamw(module: LightningModule) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4)


class ZooModule(LightningModule):
    """A network that gives its own loss, and batches for it.

    Args:
        net: called with a batch's tensors by name; gives an output with a ``loss``, or the loss itself.
        rows: makes a batch of that many samples, from a generator.
        optimizer: made from the module.
    """

    def __init__(
        self, net: nn.Module, rows: Callable[[int, torch.Generator], Batch], optimizer: OptimizerOf = adamw
    ) -> None:
        super().__init__()
        self.net = net
        self.rows = rows
        self.optimizer = optimizer

    def batch(self, batch_size: int, seed: int = 0) -> Batch:
        """Random samples."""
        return self.rows(batch_size, torch.Generator().manual_seed(seed))

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        out = self.net(**batch)
        loss: Tensor = out if isinstance(out, Tensor) else out.loss
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocabulary, (batch_size, length), generator=generator)
        return {"input_ids": ids, "labels": ids}

    return rows


def _images(size: int, classes: int) -> Callable[[int, torch.Generator], Batch]:
    def rows(batch_size: int, generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(batch_size, 3, size, size, generator=generator),
            "labels": torch.randint(0, classes, (batch_size,), generator=generator),
        }

    return rows


# -- transformers ------------------------------------------------------------------------------------------------------


class GPTLoss(nn.Module):
    """The shared ``TinyGPT`` and its loss."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.gpt = TinyGPT(layers)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(input_ids).flatten(0, 1), labels.flatten())


def tiny_gpt(layers: int = 2) -> ZooModule:
    """Blocks of plain torch, each with a fused projection of query, key and value."""
    return ZooModule(GPTLoss(layers), _tokens(VOCABULARY, LENGTH))


def gpt2(width: int = 32, layers: int = 2, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """Conv1D instead of Linear, embedding tied to the head."""
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=max(2, width // 64),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return ZooModule(transformers.GPT2LMHeadModel(config), _tokens(vocabulary, length))


def with_cache(module: ZooModule) -> ZooModule:
    """Let a model of transformers make a cache of keys and values, which is the default of its configuration."""
    for each in module.modules():
        if hasattr(each, "config"):
            each.config.use_cache = True
    return module


def llama(width: int = 32, layers: int = 2, vocabulary: int = 96, length: int = 12, **config: Any) -> ZooModule:
    """Rotary positions, RMSNorm, gated MLP, untied head."""
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, width // 64),
        "max_position_embeddings": length,
        "use_cache": False,
    }
    return ZooModule(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | config)), _tokens(vocabulary, length)
    )


def bert(width: int = 32, layers: int = 2, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """Encoder with biases everywhere, masked-language head tied to the embedding, an unused pooler left out."""
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ZooModule(transformers.BertForMaskedLM(config), _tokens(vocabulary, length))


def t5(width: int = 32, layers: int = 2, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """Encoder and decoder over one embedding, which is tied to the head; relative positions of the first blocks."""
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=max(8, width // max(2, width // 64)),
        d_ff=4 * width,
        num_layers=layers,
        num_heads=max(2, width // 64),
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return ZooModule(transformers.T5ForConditionalGeneration(config), _tokens(vocabulary, length))


def vit(width: int = 32, layers: int = 2, size: int = 16, patch: int = 4) -> ZooModule:
    """Patches by a convolution, class token and positions as bare parameters."""
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64),
        intermediate_size=4 * width,
        image_size=size,
        patch_size=patch,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return ZooModule(transformers.ViTForImageClassification(config), _images(size, 10))


def swin(
    width: int = 16, depths: tuple[int, ...] = (2, 2), size: int = 32, patch: int = 4, window: int = 4
) -> ZooModule:
    """Shifted windows; the width doubles from stage to stage."""
    config = transformers.SwinConfig(
        image_size=size,
        patch_size=patch,
        embed_dim=width,
        depths=list(depths),
        num_heads=[max(2, width // 32) * 2**stage for stage in range(len(depths))],
        window_size=window,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        drop_path_rate=0.0,
        num_labels=10,
    )
    return ZooModule(transformers.SwinForImageClassification(config), _images(size, 10))


def mixtral(
    width: int = 32, layers: int = 2, experts: int = 4, vocabulary: int = 96, length: int = 12, **config: Any
) -> ZooModule:
    """Mixture of experts with a router and its auxiliary loss: which expert sees which token depends on the data."""
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": max(2, width // 64),
        "num_key_value_heads": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": length,
        "use_cache": False,
    }
    return ZooModule(
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes | config)), _tokens(vocabulary, length)
    )


# -- plain torch -------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with batch norm, and a projection where the width changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, stages that double the width, a classifier."""

    def __init__(self, width: int, stages: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        widths = [width * 2**stage for stage in range(stages)]
        self.stages = nn.Sequential(
            *(nn.Sequential(Residual(widths[max(0, i - 1)], w), Residual(w, w)) for i, w in enumerate(widths))
        )
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.stem(pixel_values))))
        return F.cross_entropy(self.classifier(x.mean((2, 3))), labels)


def resnet(width: int = 8, stages: int = 2, size: int = 16) -> ZooModule:
    """BatchNorm: buffers that every step changes."""
    return ZooModule(ResNet(width, stages), _images(size, 10))


class Sequence(nn.Module):
    """An embedding, a body over (b, t, width), and a head: next-token loss."""

    def __init__(self, body: nn.Module, width: int, vocabulary: int, width_out: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.body = body
        self.head = nn.Linear(width_out or width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        out = self.body(self.embed(input_ids))
        x = out[0] if isinstance(out, tuple) else out
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def encoder(width: int = 32, layers: int = 2, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """nn.TransformerEncoder: nn.MultiheadAttention reads the weight of a submodule that it never calls."""
    layer = nn.TransformerEncoderLayer(width, max(2, width // 64), 4 * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return ZooModule(Sequence(body, width, vocabulary), _tokens(vocabulary, length))


def lstm(width: int = 24, layers: int = 2, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """All weights of all layers in one module and one kernel."""
    body = nn.LSTM(width, width, layers, batch_first=True)
    return ZooModule(Sequence(body, width, vocabulary), _tokens(vocabulary, length))


class Stack(nn.Module):
    """Pre-norm transformer blocks; a projection where the width changes."""

    def __init__(self, widths: tuple[int, ...], length: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(length, widths[0]))
        layers: list[nn.Module] = []
        for before, width in zip((widths[0], *widths), widths, strict=False):
            layers += [nn.Linear(before, width)] if before != width else []
            layers.append(Block(width, heads=max(2, width // 64)))
        self.layers = nn.Sequential(*layers, nn.LayerNorm(widths[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.position)


def stack(widths: tuple[int, ...] = (32, 32), vocabulary: int = 96, length: int = 12) -> ZooModule:
    """A GPT of blocks of the given widths."""
    body = Stack(widths, length)
    return ZooModule(Sequence(body, widths[0], vocabulary, widths[-1]), _tokens(vocabulary, length))


class LoRA(nn.Module):
    """A frozen Linear beside a trained product of two thin matrices (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """A feed-forward block of LoRA layers around a residual."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width).requires_grad_(False)
        self.grow = LoRA(nn.Linear(width, 4 * width), rank)
        self.shrink = LoRA(nn.Linear(4 * width, width), rank)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(F.gelu(self.grow(self.norm(x))))


def lora(width: int = 32, layers: int = 2, rank: int = 4, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """Most weights frozen: no gradient, no optimizer state, nothing to reduce."""
    body = nn.Sequential(*(Adapted(width, rank) for _ in range(layers)))
    net = Sequence(body, width, vocabulary)
    net.embed.requires_grad_(False)

    def trained(module: LightningModule) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)

    return ZooModule(net, _tokens(vocabulary, length), trained)


class Routed(nn.Module):
    """Experts as modules: each is called only if any token chose it."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.after = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)  # (b, t, experts)
        chosen = weights.argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                y[mine] = expert(x[mine]) * weights[..., index][mine].unsqueeze(-1)
        return x + self.after(y)


def routed(width: int = 32, layers: int = 2, experts: int = 4, vocabulary: int = 96, length: int = 12) -> ZooModule:
    """Modules that run on some ranks and not on others."""
    body = nn.Sequential(*(Routed(width, experts) for _ in range(layers)))
    return ZooModule(Sequence(body, width, vocabulary), _tokens(vocabulary, length))


ZOO: Mapping[str, Callable[..., ZooModule]] = {
    make.__name__: make
    for make in (stack, gpt2, llama, bert, t5, vit, swin, mixtral, resnet, encoder, lstm, lora, routed)
}
