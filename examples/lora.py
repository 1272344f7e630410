"""Fine-tunes a LLaMA with LoRA: the model is frozen, and small adapters beside its linear layers learn a new language.

    pip install peft
    python examples/lora.py

Nothing is downloaded: the weights are random and the language is counting in steps. For a real job, build the model
with ``LlamaForCausalLM.from_pretrained(...)`` and take your own texts.
"""

import argparse

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_osdp

VOCABULARY, LENGTH = 128, 32


class LoraLlama(L.LightningModule):
    def __init__(self, layers: int = 2, width: int = 128, rank: int = 8, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            initializer_range=0.05,
        )
        self.llama = get_peft_model(
            LlamaForCausalLM(config), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.llama(input_ids=batch[0], labels=batch[0]).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        loss = self.llama(input_ids=batch[0], labels=batch[0]).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(adapters, lr=self.hparams.learning_rate)


def counting(count: int, seed: int) -> TensorDataset:
    """Sequences like 5 8 11 14 ...: where they start and the step, 1 to 4, differ."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    step = torch.randint(1, 5, (count, 1), generator=generator)
    return TensorDataset((start + step * torch.arange(LENGTH)) % VOCABULARY)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a LLaMA with LoRA.")
    parser.add_argument("--devices", type=int, default=2, help="processes, one for each device")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--memory-limit", default="auto", help="per device, such as 1GiB")
    args = parser.parse_args()
    L.seed_everything(1)
    model = LoraLlama()
    train, validation = DataLoader(counting(8192, seed=1), 16, shuffle=True), DataLoader(counting(256, seed=2), 16)
    trainer = L.Trainer(
        devices=args.devices,
        strategy=lightning_osdp.OSDPStrategy(memory_limit=args.memory_limit),
        max_steps=args.max_steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.validate(model, validation)
    trainer.fit(model, train)
    trainer.validate(model, validation)
    if trainer.is_global_zero:  # the model is an ordinary one again
        model.llama.save_pretrained("runs/lora")


if __name__ == "__main__":
    main()
