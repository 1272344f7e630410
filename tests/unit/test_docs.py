"""README and site: what they say to run runs, what they link to exists, what they list is all there is."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_osdp
from bench import pictures
from lightning_osdp.cli import fit, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
hooks = runpy.run_path(str(DOCS / "site" / "hooks.py"))
"""What the site is made with."""
README = ROOT / "README.md"
GENERATED = {"benchmarks/runs.md", "gpu/benchmarks/runs.md", "paper.md", "accuracy.md"}
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [README, *PAGES]
OSDP = [sys.executable, "-m", "lightning_osdp"]
MAKE_RUNS = ("make train", "make test")
"""Commands that have tests of their own, or are the tests."""


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language; indented ones too."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in text.splitlines(True)) for indent, text in found]


def commands(page: Path) -> list[str]:
    """The lines of console blocks, without comments."""
    lines = "".join(blocks(page, "console")).splitlines()
    return [line for line in (line.split("#")[0].strip() for line in lines) if line]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_each_row_of_compatibility_has_a_test_that_exists() -> None:
    text = (DOCS / "compatibility.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\|(?! situation| ---)", line)]
    places, file = {"P": "parity", "E": "e2e", "U": "unit"}, ""
    for row in rows:
        cell = row.rstrip("| ").rpartition(" | ")[2]
        named = re.findall(r"`(?:([PEU])/([\w/]+\.py)::)?(test_\w+)`", cell)
        assert named or cell == "the same", row
        for place, path, name in named:
            file = f"{places[place]}/{path}" if path else file
            assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), row


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        call, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_site_builds_strictly_with_every_page(site: Path) -> None:
    """Strict: a broken link or anchor, or a page that the navigation leaves out, is an error."""
    built = {str(page.relative_to(site).with_suffix(".md")) for page in site.rglob("*.html")}
    assert {str(page.relative_to(DOCS)) for page in PAGES} | {"reference/cli.md"} <= built


def test_site_needs_nothing_from_elsewhere(site: Path) -> None:
    for page in ("index.html", "how-it-works.html", "reference/api.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?:[^\s\">]+)", (site / page).read_text())
        assert loaded == [], page


def test_site_documents_every_public_name_setting_and_command(site: Path) -> None:
    reference, command_line = (
        (site / "reference" / "api.html").read_text(),
        (site / "reference" / "cli.html").read_text(),
    )
    assert all(f'id="lightning_osdp.{name}"' in reference for name in lightning_osdp.__all__)
    assert all(f"osdp {name}" in command_line for name in (*main.COMMANDS, *fit.SUBCOMMANDS))
    assert "--memory-limit" in command_line
    settings = (site / "guide" / "settings.html").read_text()
    for kind in (lightning_osdp.OSDPStrategy, lightning_osdp.OSDPCallback):
        documented = re.findall(r"^ {8}([a-z_]+): (?!set by the Trainer)", kind.__doc__ or "", re.MULTILINE)
        assert len(documented) >= 4
        assert all(f"<code>{name}</code>" in settings for name in documented), documented


def test_tables_of_settings_in_pages_are_those_of_the_code() -> None:
    pages = [page for page in PAGES if "<!-- settings of" in page.read_text(encoding="utf-8")]
    assert len(pages) == 2
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text == hooks["with_settings"](text), "run: python docs/site/hooks.py"


def test_readme_is_at_most_120_lines_long() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_is_at_most_200_lines_long_unless_it_is_generated(page: Path) -> None:
    assert str(page.relative_to(DOCS)) in GENERATED or len(page.read_text(encoding="utf-8").splitlines()) <= 200


def test_links_of_readme_lead_to_files_that_exist() -> None:
    linked = re.findall(r"\]\((?!http)([^)#]+)", README.read_text(encoding="utf-8"))
    assert len(linked) > 10
    assert [name for name in linked if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_python_and_use_public_names(page: Path) -> None:
    for block in blocks(page, "python"):
        assert "8 < --" not in block, "a formatter has taken the inclusion of a file for code"
        if block.lstrip().startswith("--8<--"):
            block = (ROOT / block.split('"')[1]).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(block)):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "lightning_osdp"
            ):
                assert hasattr(lightning_osdp, node.attr), f"lightning_osdp.{node.attr}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_and_subcommands_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= make_targets()
    assert {line.split()[1] for line in commands(page) if line.startswith("make ")} <= make_targets()
    known = {*main.COMMANDS, *fit.SUBCOMMANDS, "--help", "--version"}
    assert {line.split()[1] for line in commands(page) if line.startswith("osdp ")} <= known


@pytest.fixture(scope="module")
def example_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a clone after `make train`: the examples, and a plan where the run leaves it."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("examples", "pyproject.toml", "README.md", "LICENSE", "lightning_osdp"):
        (folder / name).symlink_to(ROOT / name)
    plan = readme_plan(folder)
    run = folder / "runs" / "train_gpt"
    run.mkdir(parents=True)
    (run / "osdp_plan.json").write_text(plan.to_json(), encoding="utf-8")
    return folder


def readme_plan(folder: Path) -> lightning_osdp.ExecutionPlan:
    """Run the README's block that plans a module of one's own, with the quickstart's in its place."""
    (block,) = [block for block in blocks(README, "python") if "lightning_osdp.plan(" in block]
    scope: dict[str, object] = {"__name__": "first"}
    exec(next(block for block in blocks(DOCS / "quickstart.md", "python") if "class Net" in block), scope)
    scope |= {"MyModule": scope["Net"], "my_data": scope["data"]}
    exec(block, scope)
    plan = scope["plan"]
    assert isinstance(plan, lightning_osdp.ExecutionPlan)
    return plan


@pytest.mark.parametrize("command", [c for c in commands(README) if not c.startswith(MAKE_RUNS)])
def test_command_of_readme_runs(command: str, example_run: Path) -> None:
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:  # without a network, and leaving this environment as it is
        words = [sys.executable, "-m", "pip", *words[1:], "--dry-run", "--no-deps", "--no-build-isolation"]
    elif Path(words[0]).name == "osdp":
        words = [*OSDP, *words[1:]]
    done = subprocess.run(words, cwd=example_run, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_pictures_of_concepts_are_those_that_the_script_draws(tmp_path: Path) -> None:
    drawn = [draw(tmp_path) for draw in pictures.DRAWN]
    assert {file.name for file in drawn} == {file.name for file in pictures.FOLDER.iterdir()}
    assert all(file.read_bytes() == (pictures.FOLDER / file.name).read_bytes() for file in drawn), (
        "python -m bench.pictures"
    )
