"""Reuses the profiles of steps that were traced before, so that a known step is traced in part or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from lightning_osdp.planning.spec.model import ModelProfile
from lightning_osdp.profiling.tracing.profile_builder import fingerprint
from lightning_osdp.profiling.tracing.trace import TracedStep, TrainingStep, choose_batch_sizes, start_fake_trace, trace

MODEL_PROFILE_VERSION = 17
"""Version of stored profiles, raised when the meaning of what they are made of changes."""


class ModelProfileStore(Protocol):
    """Stored profiles by keys, which begin with ``architecture_key``."""

    def load(self, key: str) -> ModelProfile | None:
        """Return the stored profile, or None."""

    def save(self, key: str, model_profile: ModelProfile) -> None:
        """Store a profile for later starts."""


def trace_with_store(step: TrainingStep, store: ModelProfileStore, key: str = "") -> TracedStep:
    """Trace ``step`` on fake tensors only as far as ``store`` does not know it, and add its profile to ``store``.

    A step is known if the smaller batch size shows the same operators, kernels, shapes, memory and optimizers.

    Args:
        step: The step to trace.
        store: Profiles of steps that were traced before.
        key: Key under which another process has found this step, which is then not traced at all; empty if none did.

    Raises:
        ConfigurationError: If nothing in the module is trainable.
        TraceError: If the step does not run on fake tensors; the cause is chained.
    """
    stored = store.load(key) if key else None
    if stored is not None and stored.only_batch_size == step.batch_size:
        step = step.at_own_batch_size()
    sizes, retrace = choose_batch_sizes(step), partial(trace, replace(step, tensor_degrees=()))
    if stored is not None and stored.fingerprint == fingerprint(step.module, stored.operators):
        sizes = (*sizes[:-1], int(key.rsplit("-", 1)[1]))
        return TracedStep(stored, {}, (), sizes, retrace, key)
    with start_fake_trace(step, sizes) as started:
        smaller = started.result()
        key = _step_key(step, started.sizes, smaller)
        stored = store.load(key)
        if stored is None:
            started.record_larger_batch()
            traced = started.result()
    if stored is not None:
        return replace(smaller, model_profile=stored, batch_sizes=started.sizes, retrace=retrace, key=key)
    store.save(key, traced.model_profile)
    return traced


def architecture_key(module: torch.nn.Module) -> str:
    """Return a short key, the same for modules with equal names, shapes, dtypes and trainability of parameters."""
    return fingerprint(module)[:12]


def _step_key(step: TrainingStep, sizes: tuple[int, ...], smaller: TracedStep) -> str:
    """Return the architecture's key, a hash of all that the smaller batch size shows, and the larger batch size."""
    options = (sizes, step.evaluation, step.tensor_degrees, torch.__version__, MODEL_PROFILE_VERSION)
    facts = (*options, smaller.kernels, smaller.optimizer_kernels)
    digest = hashlib.sha256(f"{facts}{smaller.model_profile.model_dump_json()}".encode()).hexdigest()[:32]
    return f"{architecture_key(step.module)}-{digest}-{sizes[-1]}"
