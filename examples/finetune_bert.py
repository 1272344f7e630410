"""Fine-tunes BERT to tell good reviews from bad ones: stops early, saves the best checkpoint, and classifies with it.

    python examples/finetune_bert.py

Nothing is downloaded: the weights are random and the reviews are drawn from two lists of words. For a real job,
build the model with ``BertForSequenceClassification.from_pretrained(...)`` and take your own texts.
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

import lightning_osdp

BAD, GOOD, PLAIN, WORDS, LENGTH = 100, 200, 300, 1000, 32  # tokens 100-199 are bad words, 200-299 good, 300-999 neither


class ReviewClassifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
        )
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.bert(input_ids=batch[0], labels=batch[1]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        accuracy = (self.bert(input_ids=batch[0]).logits.argmax(-1) == batch[1]).float().mean()
        self.log("val_accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Reviews(L.LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size  # a start: the strategy chooses the batch size that trains fastest

    def setup(self, stage: str) -> None:
        self.train, self.validation = self.make(8192, seed=1), self.make(512, seed=2)

    def make(self, count: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(2, (count,), generator=generator)
        tokens = torch.randint(PLAIN, WORDS, (count, LENGTH), generator=generator)
        opinions = torch.where(labels == 1, GOOD, BAD)[:, None] + torch.randint(100, tokens.shape, generator=generator)
        is_opinion = torch.rand(tokens.shape, generator=generator) < 0.2
        return TensorDataset(torch.where(is_opinion, opinions, tokens), labels)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.validation, self.batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune BERT on reviews.")
    parser.add_argument("--devices", type=int, default=2, help="processes, one for each device")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--memory-limit", default="auto", help="per device, such as 1GiB")
    args = parser.parse_args()
    L.seed_everything(1)
    best = ModelCheckpoint("runs/finetune_bert", "best", monitor="val_accuracy", mode="max")
    trainer = L.Trainer(
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(memory_limit=args.memory_limit),
        max_steps=args.max_steps,
        val_check_interval=min(20, args.max_steps),
        callbacks=[best, EarlyStopping("val_accuracy", mode="max", stopping_threshold=0.98, patience=5)],
        logger=False,
    )
    trainer.fit(ReviewClassifier(), Reviews())
    if trainer.is_global_zero:  # an ordinary checkpoint: no trainer, no process group, any number of devices
        model = ReviewClassifier.load_from_checkpoint(best.best_model_path, map_location="cpu").eval()
        good = model.bert(input_ids=torch.randint(GOOD, PLAIN, (1, LENGTH))).logits.softmax(-1)[0, 1]
        print(f"best accuracy {best.best_model_score:.3f}; a review of good words is good with probability {good:.3f}")


if __name__ == "__main__":
    main()
