"""A model that no memory here could hold is read from the meta device."""

from __future__ import annotations

import pytest
import torch

from lightning_osdp.backend import memory
from lightning_osdp.planning.spec.model import ModelProfile
from tests.support.traced_models import trace
from tests.support.zoo import ZooModule, llama

CPU = torch.device("cpu")


def llama_of_7b(layers: int) -> ZooModule:
    """The widths of LLaMA 7 B (Touvron et al., 2023), which has 32 layers."""
    return llama(4096, layers, 32000, 512, num_attention_heads=32, intermediate_size=11008)


@pytest.fixture(scope="module")
def traced_7b_on_meta() -> tuple[ZooModule, ModelProfile, int]:
    tiny = llama()
    trace(tiny, tiny.batch(2), 2, device=CPU)  # libraries load at their first use
    before = memory.memory_in_use(CPU)
    memory.reset_peak(CPU)
    with torch.device("meta"):
        module = llama_of_7b(layers=2)
    found = trace(module, module.batch(2), 2, device=CPU).model_profile
    return module, found, memory.peak_memory(CPU) - before


def test_trace_meta_7b_model_allocates_no_parameter_sized_memory(
    traced_7b_on_meta: tuple[ZooModule, ModelProfile, int],
) -> None:
    module, found, growth = traced_7b_on_meta
    assert found.num_parameters == sum(p.numel() for p in module.parameters()) == 666_914_816
    assert growth < 64 << 20  # an embedding alone takes 500 MiB, activations of 8 samples 400 MiB and more
    assert all(p.device.type == "meta" and p.grad is None for p in module.parameters())


def test_trace_meta_7b_model_reports_state_and_activation_bytes(
    traced_7b_on_meta: tuple[ZooModule, ModelProfile, int],
) -> None:
    _, found, _ = traced_7b_on_meta
    states = sum(p.state_bytes for operator in found.operators for p in operator.parameters)
    assert states / found.num_parameters == pytest.approx(16, rel=1e-4)  # Adam in float32
    largest = max(moment.live.value_at(8) for moment in found.moments)
    logits = 8 * 512 * 32000 * 4
    assert largest > 2 * logits
    assert sum(operator.is_shardable for operator in found.operators) == 2 + 2 * 7
