"""Builds wheel and sdist, installs each into an empty environment, and trains and explains there.

    make dist-test

Nothing of the checkout is used but the files that are built and the example that is copied: builds and environments are
temporary folders, and every command runs in a folder that has no ``lightning_osdp``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="osdp-dist-") as name:
        folder = Path(name)
        wheel, sdist = build(folder)
        python = create_environment(folder / "installed")
        started = time.monotonic()
        run([python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel], folder)
        print(f"installed the wheel with its dependencies in {time.monotonic() - started:.0f} s")
        try_installation(python, folder, "wheel")
        run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "lightning-osdp"], folder)
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", sdist], folder)
        try_installation(python, folder, "sdist")
        print("wheel and sdist install, train and explain")


def build(folder: Path) -> tuple[Path, Path]:
    """Builds what is tracked, so that neither leftovers get in nor build folders stay behind."""
    source, output = folder / "source", folder / "dist"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, tracked.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    python = create_environment(folder / "builder")
    run([python, "-m", "pip", "install", "--quiet", "build"], folder)
    run([python, "-m", "build", "--outdir", output, source], folder)
    (wheel,), (sdist,) = output.glob("*.whl"), output.glob("*.tar.gz")
    print(f"built {wheel.name} ({wheel.stat().st_size >> 10} KiB) and {sdist.name} ({sdist.stat().st_size >> 10} KiB)")
    return wheel, sdist


def create_environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def try_installation(python: Path, folder: Path, kind: str) -> None:
    """Trains the example with two ranks, and asks the installed command about the plan that it wrote."""
    started = time.monotonic()
    elsewhere = folder / f"work-{kind}"
    elsewhere.mkdir()
    shutil.copy2(ROOT / "examples" / "gan.py", elsewhere)
    where = run([python, "-c", "import lightning_osdp; print(lightning_osdp.__file__)"], elsewhere)
    assert str(folder) in where, where
    osdp = python.with_name("osdp")
    assert run([osdp, "--version"], elsewhere).startswith("osdp ")
    trained = run([python, "gan.py", "--devices", "2", "--max-steps", "20"], elsewhere)
    assert "Execution plan for" in trained, trained
    assert "batch size" in run([osdp, "explain", "osdp_plan.json"], elsewhere)
    refused = run([osdp, "explain", "osdp_plan.json", "--html", "plan.html"], elsewhere, status=2)
    assert "pip install 'lightning-osdp[pictures]'" in refused, refused
    assert "h100" in run([osdp, "simulate", "--config", "none.yaml", "--hardware", "nothing"], elsewhere, status=2)
    print(f"{kind}: trained and explained in {time.monotonic() - started:.0f} s")


def run(command: list[object], folder: Path, status: int = 0) -> str:
    """What a command prints; it sees no checkout and no settings of ours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"LIGHTNING_OSDP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode != status:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
