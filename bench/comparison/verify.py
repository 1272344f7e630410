"""Every system learns the same: losses against plain PyTorch on the union of the ranks' batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

import torch

from bench.comparison.data import Ladder, Text
from bench.comparison.jobs import Job
from bench.comparison.models import MODELS, adamw, build, next_byte_loss
from bench.comparison.records import Runs
from bench.comparison.systems import OSDP, System

STEPS, BATCH_SIZE = 6, 3
TOLERANCE = 2e-4
"""Of a loss of about 5 after six steps. AdamW divides by the root of small second moments: rounding grows."""


def reference(model: str, ranks: int) -> list[float]:
    """Losses of a plain loop in this process."""
    text = Text(MODELS[model].tokens)
    task = build(model)
    optimizer = adamw(task)
    losses = []
    for indices in Ladder([(BATCH_SIZE * ranks, STEPS)], 0, 1):
        batch = torch.stack([text[index] for index in indices])
        optimizer.zero_grad()
        loss = next_byte_loss(task(batch[:, :-1]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def verify(runs: Runs, model: str, setting: str, systems: Sequence[System], device: str) -> dict[str, str]:
    """What each system's losses are off by, or why it has none. Begins with ``ok`` where they agree."""
    verdicts: dict[str, str] = {}
    expected: list[float] = []
    for system in (System(OSDP), *systems):
        job = Job("verify", model, setting, system.name, (BATCH_SIZE,), warm_up=STEPS - 1, steps=1, device=device)
        expected = expected or _in_another_process(model, job.where.ranks)
        result = runs.get(job)
        if result["outcome"] != "ok":
            verdicts[system.name] = f"{result['outcome']}: {result['error'][-300:]}"
            continue
        found = [sum(losses) / len(losses) for losses in zip(*result["losses"], strict=True)]
        worst = max(abs(one - other) for one, other in zip(found, expected, strict=True))
        verdicts[system.name] = f"{'ok' if worst < TOLERANCE else 'WRONG'}: off by {worst:.1e} at most"
    return verdicts


def _in_another_process(model: str, ranks: int) -> list[float]:
    """Training here would start threads, and ranks are forked from here."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(reference(model, ranks)))
    process.start()
    sender.close()
    losses: list[float] = receiver.recv()
    process.join()
    return losses
