import lightning as L
import torch
from torch import nn

import lightning_osdp


class TwoTowers(L.LightningModule):
    """Users and items as vectors; the score of a pair is what a small network makes of them."""

    def __init__(self, users: int = 100_000, items: int = 20_000, width: int = 64):
        super().__init__()
        self.users = nn.Embedding(users, width)
        self.items = nn.Embedding(items, width)
        self.score = nn.Sequential(nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, batch_index):
        user, item, label = batch
        pair = torch.cat([self.users(user), self.items(item)], dim=-1)  # (B, 2 * width)
        return nn.functional.binary_cross_entropy_with_logits(self.score(pair).squeeze(-1), label)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def clicks(samples: int = 16_384) -> torch.utils.data.DataLoader:
    users, items = torch.randint(100_000, (samples,)), torch.randint(20_000, (samples,))
    labels = ((users + items) % 2).float()
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(users, items, labels), batch_size=64)


if __name__ == "__main__":
    L.seed_everything(1)
    plan = lightning_osdp.plan(TwoTowers(), clicks(), hardware="2xh100-80gb-nvlink+10gbit", memory_limit="120MiB")
    print(plan)
