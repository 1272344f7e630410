"""What oneDNN keeps of kernels that ran once is freed, in a process of its own whose caches are empty before."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from lightning_osdp.backend.allocator import run_and_free_kernels

CPU = torch.device("cpu")

PROGRAM = """
import torch
from lightning_osdp.backend.allocator import run_and_free_kernels
from lightning_osdp.backend.memory import memory_in_use, trim

cpu = torch.device("cpu")

def work():
    for i in range(200):
        x, weight = torch.randn(100 + 8 * i, 768), torch.randn(96 + 16 * (i % 40), 768)
        torch.nn.functional.linear(x.bfloat16(), weight.bfloat16())

def grown(run):
    trim(cpu)
    before = memory_in_use(cpu)
    run()
    trim(cpu)
    print((memory_in_use(cpu) - before) >> 20)

grown(lambda: run_and_free_kernels(cpu, {torch.bfloat16}, work) if FREES else work())
"""


def grown_mib(frees: bool) -> int:
    program = PROGRAM.replace("FREES", str(frees))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


def test_kernels_of_200_shapes_are_freed() -> None:
    kept = grown_mib(frees=False)
    if kept < 80:
        pytest.skip(f"this processor's kernels take {kept} MiB: none are compiled for each shape")
    assert grown_mib(frees=True) < kept / 2


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_function_that_compiles_nothing_runs_where_it_is(device: str, dtype: torch.dtype) -> None:
    assert run_and_free_kernels(torch.device(device), {dtype}, threading.current_thread) is threading.current_thread()


def test_error_of_the_function_is_raised() -> None:
    with pytest.raises(KeyError, match="lost"):
        run_and_free_kernels(CPU, {torch.bfloat16}, lambda: {}["lost"])
