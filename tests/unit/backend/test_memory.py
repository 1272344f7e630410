"""What counters say of memory, and what is kept free."""

from __future__ import annotations

import linecache
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_osdp.backend import allocator, memory
from lightning_osdp.backend.cpu import process_memory


def test_clear_linecache_drops_only_lines_readable_from_files() -> None:
    made_up = ["x = 1\n"]
    linecache.cache["<made up>"] = (6, None, made_up, "<made up>")
    try:
        line = linecache.getline(__file__, 1)
        assert line
        memory.clear_linecache()
        assert __file__ not in linecache.cache
        assert linecache.getline("<made up>", 1) == made_up[0]  # as notebooks keep theirs: there is no file
        assert linecache.getline(__file__, 1) == line
    finally:
        del linecache.cache["<made up>"]


def test_expected_file_pages_count_only_for_detected_limit_before_first_step() -> None:
    cpu = torch.device("cpu")
    found, given = memory.MemoryLimit(cpu, 1), memory.MemoryLimit(cpu, 1, user_limit=1 << 30)
    assert found.expected_file_pages("measured") == memory.EXPECTED_FILE_PAGE_BYTES > 0
    assert found.expected_file_pages("tried") == given.expected_file_pages("measured") == 0
    assert memory.MemoryLimit(torch.device("cuda"), 1).expected_file_pages("measured") == 0
    assert found.file_pages() > given.file_pages() == 0


def test_memory_limit_by_share_is_that_part_of_what_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "usable_bytes", lambda *_: 1000)
    cpu = torch.device("cpu")
    assert memory.MemoryLimit(cpu, 1, share=0.9).current() == 900
    assert memory.MemoryLimit(cpu, 1, user_limit=500, share=0.9).current() == 500


def test_memory_limit_of_cgroup_is_shared_and_includes_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_cgroup_limits", lambda: [1 << 30, 2 << 30])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30))
    monkeypatch.setattr(process_memory, "file_pages", lambda: 100 << 20)
    assert memory.memory_limit(torch.device("cpu"), 4, group_ranks=2) == (612 << 20) - (1 << 20)
    assert memory.memory_limit(torch.device("cpu"), 2) == (612 << 20) - (1 << 20)


def test_process_memory_without_proc_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    usual = memory.memory_in_use(cpu)
    monkeypatch.setattr(process_memory, "PROC", tmp_path / "missing")
    memory.reset_peak(cpu)
    assert memory.memory_in_use(cpu) == pytest.approx(usual, rel=0.2)
    assert 0.8 * usual < memory.peak_memory(cpu) < 10 * usual
    assert memory.control_group(cpu) == ""
    assert memory.MemoryLimit(cpu, 1).file_pages() == 0
    available = psutil.virtual_memory().available
    assert memory.memory_limit(cpu, 1) == pytest.approx(available + usual, rel=0.2)
    assert memory.memory_limit(cpu, 4) == pytest.approx(available / 4 + usual, rel=0.2)


def test_process_memory_of_a_sandbox_that_tells_little_is_that_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gVisor's status has no peak, no pages of files, and a counter that can't be reset."""
    cpu = torch.device("cpu")
    usual = memory.memory_in_use(cpu)
    (tmp_path / "status").write_text(f"Name:\tpython\nVmRSS:\t{usual >> 10} kB\n")
    (tmp_path / "clear_refs").mkdir()  # writing to it is an OSError
    monkeypatch.setattr(process_memory, "PROC", tmp_path)
    memory.reset_peak(cpu)
    assert 0.8 * usual < memory.peak_memory(cpu) < 10 * usual
    assert memory.MemoryLimit(cpu, 1).file_pages() == 0


CUDA = torch.device("cuda", 0)


class FakeGpu:
    """Stands in for a device of 100 GiB, of which 10 are this process's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fraction: float, free_gib: int = 90) -> None:
        self.fraction, self.settings = fraction, ""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib << 30, 100 << 30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100 << 30))
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: self.set(share))
        monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", self.configure)

    def set(self, fraction: float) -> None:
        self.fraction = fraction

    def configure(self, settings: str) -> None:
        """As torch does it: what is not named is as it is by default."""
        self.settings, self.fraction = settings, 1.0


@pytest.mark.parametrize(
    ("fraction", "free_gib", "expected_gib", "single_gib"),
    [(1.0, 90, 88.0, 92.0), (1.0, 40, 46.0, 46.0), (0.5, 90, 44.0, 48.5), (0.5, 30, 36.8, 36.8)],
    ids=["by itself", "beside others", "capped", "capped beside others"],
)
def test_memory_limit_on_cuda_counts_free_memory_and_process_fraction(
    monkeypatch: pytest.MonkeyPatch, fraction: float, free_gib: int, expected_gib: float, single_gib: float
) -> None:
    """Less lies between tensors where nothing is gathered."""
    FakeGpu(monkeypatch, fraction, free_gib)
    assert memory.memory_limit(CUDA, 1) == pytest.approx(expected_gib * (1 << 30))
    monkeypatch.setattr(memory.dist, "is_initialized", lambda: True)
    for ranks, expected in ((1, single_gib), (2, expected_gib)):
        monkeypatch.setattr(memory.dist, "get_world_size", lambda ranks=ranks: ranks)
        assert memory.memory_limit(CUDA, 1) == pytest.approx(expected * (1 << 30))


def test_peak_on_cuda_includes_what_is_freed_but_waits_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"active_bytes.all.peak": 7, "allocated_bytes.all.peak": 5, "active_bytes.all.current": 3}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    assert memory.peak_memory(CUDA) == 7


def test_expand_segments_respects_user_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator.ALLOCATOR_ENV_VARS:
        monkeypatch.delenv(name, raising=False)
    gpu = FakeGpu(monkeypatch, fraction=0.5)
    allocator.enable_expandable_segments(CUDA)
    assert (gpu.settings, gpu.fraction) == ("expandable_segments:True", 0.5)
    for name in allocator.ALLOCATOR_ENV_VARS:
        gpu = FakeGpu(monkeypatch, fraction=0.5)
        with monkeypatch.context() as users:
            users.setenv(name, "max_split_size_mb:128")
            allocator.enable_expandable_segments(CUDA)
        assert (gpu.settings, gpu.fraction) == ("", 0.5)
