"""Trains a GAN with manual optimization and two optimizers: a generator learns to draw points on a ring.

    python examples/gan.py

As in every GAN, what the two networks make of each other depends on the batch size, so the strategy keeps the loader's.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_osdp

NOISE = 8


def mlp(inputs: int, outputs: int, width: int = 256) -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.LeakyReLU(0.2))]
    return nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2), *hidden, nn.Linear(width, outputs))


class GAN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(NOISE, 2), mlp(2, 1)

    def generate(self, count: int) -> Tensor:
        return self.generator(torch.randn(count, NOISE, device=self.device))  # (count, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0]
        generator_optimizer, discriminator_optimizer = self.optimizers()
        self.toggle_optimizer(discriminator_optimizer)  # real points score high, drawn ones low
        fake = self.generate(len(real)).detach()
        loss = F.softplus(-self.discriminator(real)).mean() + F.softplus(self.discriminator(fake)).mean()
        self.step(discriminator_optimizer, loss)
        self.log("discriminator_loss", loss, prog_bar=True)

        self.toggle_optimizer(generator_optimizer)  # drawn points score high
        loss = F.softplus(-self.discriminator(self.generate(len(real)))).mean()
        self.step(generator_optimizer, loss)
        self.log("generator_loss", loss, prog_bar=True)

    def step(self, optimizer: L.pytorch.core.optimizer.LightningOptimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        off = (self.generate(256).norm(dim=1) - 1).abs().mean()
        self.log("distance_from_ring", off, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        networks = self.generator, self.discriminator
        return [torch.optim.Adam(network.parameters(), lr=5e-4, betas=(0.5, 0.9)) for network in networks]


def ring(count: int) -> TensorDataset:
    angle = 2 * torch.pi * torch.rand(count)
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1) + 0.02 * torch.randn(count, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN.")
    parser.add_argument("--devices", type=int, default=2, help="processes, one for each device")
    parser.add_argument("--max-steps", type=int, default=600, help="of both optimizers together, as Lightning counts")
    parser.add_argument("--memory-limit", default="auto", help="per device, such as 1GiB")
    args = parser.parse_args()
    L.seed_everything(1)
    model, train, validation = GAN(), DataLoader(ring(1 << 16), 128, shuffle=True), DataLoader(ring(2), 1)
    trainer = L.Trainer(
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(memory_limit=args.memory_limit, batch_size="keep"),
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.validate(model, validation)
    trainer.fit(model, train)
    trainer.validate(model, validation)


if __name__ == "__main__":
    main()
