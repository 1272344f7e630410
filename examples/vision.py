"""Trains an image classifier: a vision transformer, a ConvNeXt or a ResNet, all from transformers.

    python examples/vision.py --model convnext

The images are stripes of four directions under noise. A model of torchvision or timm is used in the same way.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForImageClassification, ConvNextConfig, ResNetConfig, ViTConfig

import lightning_osdp

CLASSES, SIZE = 4, 32
MODELS = {
    "vit": ViTConfig(
        image_size=SIZE, patch_size=4, hidden_size=96, num_hidden_layers=3, num_attention_heads=3, intermediate_size=384
    ),
    "convnext": ConvNextConfig(patch_size=2, hidden_sizes=[32, 64, 96, 128], depths=[1] * 4),
    "resnet": ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 96, 128], depths=[1] * 4),
}


class ImageClassifier(L.LightningModule):
    def __init__(self, name: str, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = MODELS[name]
        config.num_labels = CLASSES
        self.model = AutoModelForImageClassification.from_config(config)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images).logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.model(images).logits.argmax(-1) == labels).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.05)


def stripes(count: int, seed: int) -> TensorDataset:
    """Waves of random length, phase and colour; the class is their direction."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    phase, length = torch.rand(2, count, 1, 1, generator=generator).mul(torch.pi)
    down, right = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    directions = torch.stack([down + 0 * right, 0 * down + right, down + right, down - right])  # (CLASSES, SIZE, SIZE)
    waves = torch.sin(directions[labels] * (0.5 + length / 3) + 2 * phase)[:, None]  # (count, 1, SIZE, SIZE)
    colour = torch.rand(count, 3, 1, 1, generator=generator)
    return TensorDataset(colour * waves + 0.3 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an image classifier.")
    parser.add_argument("--model", choices=list(MODELS), default="vit")
    parser.add_argument("--devices", type=int, default=2, help="processes, one for each device")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--memory-limit", default="auto", help="per device, such as 1GiB")
    args = parser.parse_args()
    L.seed_everything(1)
    model = ImageClassifier(args.model)
    train, validation = DataLoader(stripes(8192, seed=1), 16, shuffle=True), DataLoader(stripes(256, seed=2), 16)
    trainer = L.Trainer(
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(memory_limit=args.memory_limit),
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(model, train)
    trainer.validate(model, validation)


if __name__ == "__main__":
    main()
