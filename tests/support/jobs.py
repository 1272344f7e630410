"""Jobs as users have them: models, optimizers, callbacks and data of six kinds of training.

``build(name, size)`` makes a module for the tests (``small``) or the benchmark (``large``); ``loaders`` its data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class Job(pl.LightningModule):
    """A model with a loss; notes the losses of all steps, and logs those of validation, with the accuracy."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[Tensor] = []

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Loss and logits."""
        out = self.net(**batch)
        return out.loss, out.logits

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> Tensor:
        loss, _ = self.outputs(batch)
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        loss, logits = self.outputs(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_accuracy", self.accuracy(logits, batch["labels"]), sync_dist=True)

    def accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.argmax(-1) == labels).float().mean()


# -- BERT, with callbacks ----------------------------------------------------------------------------------------------


class Bert(Job):
    """Classifies texts; AdamW without decay of biases and norms, a warm-up."""

    def configure_optimizers(self) -> Any:
        flat = [p for p in self.parameters() if p.ndim < 2]
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": flat, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=2e-4, eps=1e-6)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


def bert(width: int, layers: int, vocabulary: int) -> Job:
    config = transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
        num_labels=2,
        attention_probs_dropout_prob=0.0,  # tensor parallel attention draws other numbers than DDP's, and so does
        classifier_dropout=0.0,  # what is between pooler and classifier
    )
    return Bert(transformers.BertForSequenceClassification(config))


def bert_callbacks() -> list[Callback]:
    """It stops when validation gets no better by 10, so after the second epoch."""
    return [
        EarlyStopping("val_loss", min_delta=10.0, patience=1),
        ModelCheckpoint(monitor="val_loss", filename="best-{epoch}", save_last=True),
        LearningRateMonitor("step"),
    ]


def texts(vocabulary: int, tokens: int, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    ids = torch.randint(5, vocabulary, (count, tokens), generator=generator)
    mask = torch.arange(tokens) < torch.randint(tokens // 2, tokens + 1, (count, 1), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "labels": (ids[:, 0] > vocabulary // 2).long()}


# -- images ------------------------------------------------------------------------------------------------------------


class ResNet(Job):
    """SGD with Nesterov's momentum and one cycle of the learning rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def resnet(width: int, layers: int) -> Job:
    widths = [width * 2**stage for stage in range(3)]
    config = transformers.ResNetConfig(
        embedding_size=width, hidden_sizes=widths, depths=[layers] * 3, layer_type="basic", num_labels=10
    )
    return ResNet(transformers.ResNetForImageClassification(config))


class ViT(Job):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-6)


def vit(width: int, layers: int, pixels: int) -> Job:
    config = transformers.ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        image_size=pixels,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.1,
    )
    return ViT(transformers.ViTForImageClassification(config))


def images(pixels: int, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    values = torch.randn(count, 3, pixels, pixels, generator=generator)
    return {"pixel_values": values, "labels": torch.randint(0, 10, (count,), generator=generator)}


# -- LoRA --------------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen Linear beside the product of two thin ones (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(self.dropout(x)))


class LoRA(Job):
    """A frozen LLaMA with adapters at its queries and values."""

    def __init__(self, net: nn.Module, rank: int) -> None:
        super().__init__(net)
        net.requires_grad_(False)
        for layer in net.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name), rank))

    def accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().accuracy(logits[:, :-1], labels[:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def lora(width: int, layers: int, vocabulary: int, rank: int) -> Job:
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LoRA(transformers.LlamaForCausalLM(config), rank)


def sentences(vocabulary: int, tokens: int, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (count, tokens), generator=generator)
    return {"input_ids": ids, "labels": ids}


# -- DLRM --------------------------------------------------------------------------------------------------------------


class Interactions(nn.Module):
    """Bags of embeddings and dense features, multiplied in pairs (Naumov et al., 2019)."""

    def __init__(self, rows: tuple[int, ...], width: int, dense: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * width), nn.ReLU(), nn.Linear(4 * width, width), nn.ReLU())
        pairs = len(rows) * (len(rows) + 1) // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, dense: Tensor, bags: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(bags[:, index]) for index, table in enumerate(self.tables))], 1)
        first, second = torch.triu_indices(vectors.shape[1], vectors.shape[1], 1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, first, second]  # (b, pairs)
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


class DLRM(Job):
    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits = self.net(batch["dense"], batch["bags"])
        return functional.binary_cross_entropy_with_logits(logits, batch["labels"]), logits

    def accuracy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits > 0).float() == labels).float().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02)


def dlrm(rows: tuple[int, ...], width: int, dense: int) -> Job:
    return DLRM(Interactions(rows, width, dense))


def clicks(rows: tuple[int, ...], dense: int, generator: torch.Generator, count: int) -> dict[str, Tensor]:
    bags = torch.stack([torch.randint(0, each, (count, 3), generator=generator) for each in rows], 1)
    labels = torch.randint(0, 2, (count,), generator=generator).float()
    return {"dense": torch.randn(count, dense, generator=generator), "bags": bags, "labels": labels}


# -- GAN ---------------------------------------------------------------------------------------------------------------


class GAN(Job):
    """Manual optimization of two networks by two optimizers in turns (DCGAN)."""

    def __init__(self, width: int, noise: int) -> None:
        super().__init__(nn.Module())
        self.automatic_optimization = False
        self.noise = noise
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 2 * width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(4 * width, 1, 4),
        )

    def judge(self, pictures: Tensor, is_real: bool) -> Tensor:
        """The loss of the discriminator if the pictures are real or not."""
        logits = self.discriminator(pictures).flatten()
        return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))

    def training_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        real = batch["pixel_values"]
        for_generator, for_discriminator = self.optimizers()
        noise = torch.randn(len(real), self.noise, 1, 1, device=self.device)
        self.toggle_optimizer(for_generator)
        made = self.generator(noise)
        loss = self.judge(made, is_real=True)
        self.losses.append(loss.detach())
        self.step(for_generator, loss)
        self.toggle_optimizer(for_discriminator)
        loss = (self.judge(real, is_real=True) + self.judge(made.detach(), is_real=False)) / 2
        self.losses.append(loss.detach())
        self.step(for_discriminator, loss)

    def step(self, optimizer: Any, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: dict[str, Tensor], batch_index: int) -> None:
        real = batch["pixel_values"]
        made = self.generator(real.flatten(1)[:, : self.noise, None, None])
        self.log("val_loss", self.judge(made, is_real=False) + self.judge(real, is_real=True), sync_dist=True)
        self.log("val_spread", made.std(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        adam = partial(torch.optim.Adam, lr=2e-4, betas=(0.5, 0.999), eps=1e-6)
        return [adam(self.generator.parameters()), adam(self.discriminator.parameters())]


def gan(width: int, noise: int) -> Job:
    return GAN(width, noise)


# -- all ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One job.

    Attributes:
        build: makes its module.
        samples: makes some samples from a generator, as one batch.
        small: arguments of both, for tests.
        large: arguments of both, for measurements.
        batch_size: samples of each rank.
        tight_bytes: for the small one, a memory limit in which it must be sharded: half of the way from what it takes
            at least to what it takes replicated and recomputed.
        trainer: arguments of the Trainer.
        callbacks: makes its callbacks.
    """

    build: Callable[..., Job]
    samples: Callable[..., dict[str, Tensor]]
    small: tuple[dict[str, Any], dict[str, Any]]
    large: tuple[dict[str, Any], dict[str, Any]]
    batch_size: int
    tight_bytes: int
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list


SMALL_ROWS, LARGE_ROWS = (3_000, 2_000, 50), (200_000, 50_000, 5_000, 300)

JOBS = {
    "bert": Kind(
        bert,
        texts,
        ({"width": 64, "layers": 2, "vocabulary": 1000}, {"vocabulary": 1000, "tokens": 12}),
        ({"width": 256, "layers": 4, "vocabulary": 16000}, {"vocabulary": 16000, "tokens": 48}),
        batch_size=4,
        tight_bytes=2_700_000,
        trainer={"gradient_clip_val": 1.0, "max_epochs": 4},
        callbacks=bert_callbacks,
    ),
    "resnet": Kind(
        resnet,
        images,
        ({"width": 16, "layers": 1}, {"pixels": 16}),
        ({"width": 48, "layers": 2}, {"pixels": 32}),
        4,
        1_095_000,
    ),
    "vit": Kind(
        vit,
        images,
        ({"width": 64, "layers": 2, "pixels": 16}, {"pixels": 16}),
        ({"width": 256, "layers": 6, "pixels": 64}, {"pixels": 64}),
        4,
        1_740_000,
    ),
    "lora": Kind(
        lora,
        sentences,
        ({"width": 64, "layers": 2, "vocabulary": 1000, "rank": 4}, {"vocabulary": 1000, "tokens": 12}),
        ({"width": 512, "layers": 6, "vocabulary": 16000, "rank": 8}, {"vocabulary": 16000, "tokens": 32}),
        4,
        1_754_000,
    ),
    "dlrm": Kind(
        dlrm,
        clicks,
        ({"rows": SMALL_ROWS, "width": 16, "dense": 13}, {"rows": SMALL_ROWS, "dense": 13}),
        ({"rows": LARGE_ROWS, "width": 32, "dense": 13}, {"rows": LARGE_ROWS, "dense": 13}),
        16,
        1_163_000,
    ),
    "gan": Kind(
        gan,
        images,
        ({"width": 32, "noise": 16}, {"pixels": 16}),
        ({"width": 48, "noise": 64}, {"pixels": 16}),
        8,
        5_617_000,
    ),
}
"""By name."""


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of one batch."""

    def __init__(self, whole: dict[str, Tensor]) -> None:
        self.whole = whole

    def __len__(self) -> int:
        return len(next(iter(self.whole.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.whole.items()}


def build(name: str, size: str) -> Job:
    """The module of a job, with the same first values at each call."""
    pl.seed_everything(7, verbose=False)
    return JOBS[name].build(**getattr(JOBS[name], size)[0])


def loader(name: str, size: str, count: int, seed: int, batch_size: int = 0, shuffle: bool = False) -> DataLoader[Any]:
    """Data of a job."""
    kind = JOBS[name]
    whole = kind.samples(**getattr(kind, size)[1], generator=torch.Generator().manual_seed(seed), count=count)
    return DataLoader(Rows(whole), batch_size=batch_size or kind.batch_size, shuffle=shuffle)
