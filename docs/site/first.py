import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_osdp


class Net(L.LightningModule):
    def __init__(self, width: int = 1024, depth: int = 4):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(width, 1)

    def training_step(self, batch, batch_index):
        x, y = batch
        return nn.functional.mse_loss(self.head(self.layers(x)), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


x = torch.randn(4096, 1024)
data = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=16)

if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_osdp.OSDPStrategy(memory_limit="2GiB"),
        max_steps=20,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Net(), data)
