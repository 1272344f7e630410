"""What counters say of memory, and what is kept free."""

from __future__ import annotations

import linecache

import pytest
import torch

from lightning_osdp.profiling import memory


def test_source_lines_are_dropped_where_their_file_has_them() -> None:
    made_up = ["x = 1\n"]
    linecache.cache["<made up>"] = (6, None, made_up, "<made up>")
    try:
        line = linecache.getline(__file__, 1)
        assert line
        memory.drop_source_lines()
        assert __file__ not in linecache.cache
        assert linecache.getline("<made up>", 1) == made_up[0]  # as notebooks keep theirs: there is no file
        assert linecache.getline(__file__, 1) == line
    finally:
        del linecache.cache["<made up>"]


def test_pages_to_come_count_only_on_top_of_a_limit_that_was_found_and_before_first_steps() -> None:
    cpu = torch.device("cpu")
    found, given = memory.Limit(cpu, 1), memory.Limit(cpu, 1, given=1 << 30)
    assert found.pages_to_come(stepped=False) == memory.PAGES_TO_COME_BYTES > 0
    assert found.pages_to_come(stepped=True) == given.pages_to_come(stepped=False) == 0
    assert memory.Limit(torch.device("cuda"), 1).pages_to_come(stepped=False) == 0
    assert found.file_pages() > given.file_pages() == 0


def test_a_control_groups_limit_is_shared_and_holds_the_kernels_page_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [1 << 30, 2 << 30])
    monkeypatch.setattr(memory, "_meminfo", lambda field: 8 << 30)
    monkeypatch.setattr(memory, "file_pages", lambda: 100 << 20)
    assert memory.memory_limit(torch.device("cpu"), 4, group_ranks=2) == (612 << 20) - (1 << 20)
    assert memory.memory_limit(torch.device("cpu"), 2) == (612 << 20) - (1 << 20)
