"""The rules of the package's shape: imports run one way, planning stands by itself, the public names are the documented
ones."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import lightning_osdp

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "lightning_osdp").glob("**/*.py"))
PLANNING = sorted((ROOT / "lightning_osdp" / "planning").glob("**/*.py"))
MAX_FILE_LINES, MAX_TOP_LEVEL_ENTRIES = 450, 13
ENGINES = {"torch", "lightning", "pytorch_lightning", "fairscale"}


def imported_packages(source: str) -> set[str]:
    """Top-level packages that ``source`` imports anywhere, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_import_linter_contracts_hold(capsys: pytest.CaptureFixture[str]) -> None:
    status = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


@pytest.mark.parametrize("path", PLANNING, ids=lambda path: path.name)
def test_planning_module_imports_no_torch_or_engine_and_prints_nothing(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert not imported_packages(source) & ENGINES
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert not any(isinstance(called, ast.Name) and called.id == "print" for called in calls)


def test_library_has_few_top_level_entries_and_no_long_file() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in LIBRARY}
    assert {name: length for name, length in lengths.items() if length > MAX_FILE_LINES} == {}
    top_level = {name.split("/")[1] for name in lengths}
    assert len(top_level) <= MAX_TOP_LEVEL_ENTRIES, sorted(top_level)


def test_imported_packages_includes_imports_inside_functions() -> None:
    source = "def f():\n    import torch.nn\n    from lightning.pytorch import Trainer\n    from . import torchlike"
    assert imported_packages(source) == {"torch", "lightning"}


def test_public_names_match_table_and_reference_of_the_docs() -> None:
    """Every name in ``__all__`` exists, and has a row and an entry of its own in the reference; no other name has."""
    reference = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `lightning_osdp\.(\w+)` \|", reference, flags=re.MULTILINE)
    assert sorted(lightning_osdp.__all__) == sorted(documented)
    assert sorted(lightning_osdp.__all__) == sorted(re.findall(r"^::: lightning_osdp\.(\w+)$", reference, re.MULTILINE))
    assert all(hasattr(lightning_osdp, name) for name in lightning_osdp.__all__)
