"""FairScale's FullyShardedDataParallel as its documentation has it, in a plain loop.

It has no place in Lightning 2.x any more, so the loop is bare: less overhead than the Trainer's, which favours it. On a
CPU it is shown streams that do nothing, and on gloo its bucketed reduce-scatter, which that refuses, is off; else it is
as released: nothing here may import lightning_osdp, whose engine gives FairScale collectives of its own.
"""

from __future__ import annotations

import contextlib
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import FullyShardedDataParallel
from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale_module
from torch import nn

from bench.comparison.data import ladder_loader
from bench.comparison.jobs import Job
from bench.comparison.models import MODELS, Task, adamw, block_classes, build, next_byte_loss
from bench.comparison.step_log import Recorder


class _Stream:
    """A CUDA stream where there is none."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""


_STREAM = _Stream()


def train(job: Job, recorder: Recorder) -> None:
    """Trains the job's model; ``recorder`` stamps each step."""
    warnings.filterwarnings("ignore")
    on_cpu = job.device == "cpu"
    if on_cpu:
        show_no_cuda()
    dist.init_process_group("gloo" if on_cpu or torch.cuda.device_count() < job.where.ranks else "nccl")
    loader = ladder_loader(MODELS[job.model].tokens, job.batches, recorder.rank, recorder.ranks)
    recorder.begin_setup()
    root = wrapped(build(job.model), job, recorder.device)
    optimizer = adamw(root)
    recorder.ready()
    for batch in loader:
        tokens = batch.to(recorder.device)
        optimizer.zero_grad()
        loss = next_byte_loss(root(tokens[:, :-1]), tokens)
        loss.backward()
        optimizer.step()
        if not recorder.after_step(len(batch), loss):
            break
    dist.destroy_process_group()


def wrapped(task: Task, job: Job, device: torch.device) -> nn.Module:
    """One unit for each operator or block, and one around the rest."""
    options: dict[str, Any] = {"compute_device": device}
    if dist.get_backend() == "gloo":
        options["bucket_cap_mb"] = 0
    task.to(device)
    blocks = tuple(block_classes(task))
    shared = _shared_parameters(task)

    def wrap(parent: nn.Module) -> None:
        for name, child in list(parent.named_children()):
            recomputed = isinstance(child, blocks) and job.how.checkpointing
            operator = job.how.base == "fairscale-op" and _is_operator(child, shared)
            whole_block = job.how.base == "fairscale-block" and isinstance(child, blocks)
            if not operator and not whole_block:
                wrap(child)
            # What is recomputed needs a unit around it: the root would free norms and biases after the first block.
            inner = checkpoint_wrapper(child) if recomputed else child
            unit = operator or whole_block or recomputed
            setattr(parent, name, FullyShardedDataParallel(inner, **options) if unit else inner)

    wrap(task)
    root = FullyShardedDataParallel(task, **options)
    if device.type == "cpu":
        for unit in root.modules():
            if isinstance(unit, FullyShardedDataParallel):
                unit._setup_streams = types.MethodType(_setup_streams, unit)
    return root


def _is_operator(module: nn.Module, shared: set[nn.Parameter]) -> bool:
    """Whether a module has a matrix of its own that no other module has too (tied weights stay with the root)."""
    own = list(module.parameters(recurse=False))
    return any(p.dim() > 1 for p in own) and not shared.intersection(own)


def _shared_parameters(task: nn.Module) -> set[nn.Parameter]:
    every = [p for module in task.modules() for p in module.parameters(recurse=False)]
    return {p for p in every if sum(p is other for other in every) > 1}


def _setup_streams(unit: Any) -> None:
    """FairScale makes streams for its root only where there is CUDA, but reads them everywhere."""
    FullyShardedDataParallel._setup_streams(unit)
    for module in unit.modules():
        if isinstance(module, FullyShardedDataParallel):
            module._streams = dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), _STREAM)


def show_no_cuda() -> None:
    """Has FairScale run on a CPU."""
    view, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    cuda.__dict__.update(
        is_available=lambda: False,
        current_stream=lambda: _STREAM,
        stream=lambda _: contextlib.nullcontext(),
        synchronize=lambda: None,
        Stream=_Stream,
    )
    view.__dict__.update({**torch.__dict__, "cuda": cuda})
    fairscale_module.torch = view
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
