"""``make test-slurm``: two SLURM nodes on this machine train with two ranks each, are preempted, and go on.

Needs root and Debian's packages slurm-wlm and munge. Not part of pytest: it starts daemons and takes minutes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = Path(__file__).with_name("cluster.sh")
NODES, DEVICES, STEPS, PREEMPTED_AT = 2, 2, 24, 8
LIMIT_S = 240


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="osdp-slurm-") as folder:
        os.environ["SLURM_CONF"] = f"{folder}/cluster/slurm.conf"
        os.chmod(folder, 0o755)
        subprocess.run([CLUSTER, "up", f"{folder}/cluster"], check=True)
        try:
            whole = train_uninterrupted(Path(folder, "whole"))
            train_preempted(Path(folder, "preempted"), whole)
            check_wrong_task_count_fails(Path(folder, "wrong"))
        finally:
            subprocess.run(["scancel", "--user=root"], check=False)
            subprocess.run([CLUSTER, "down", f"{folder}/cluster"], check=True)
    print("all of it holds")


def train_uninterrupted(folder: Path) -> list[dict[str, Any]]:
    """Without interruption."""
    job = submit(folder, seconds_per_step=0.0)
    wait_for("the run to end", lambda: job_state(job) == "COMPLETED", job, folder)
    seen = read_losses(folder)
    check([each["step"] for each in seen] == list(range(STEPS)), f"steps 0 to {STEPS - 1} were trained", seen)
    return seen


def train_preempted(folder: Path, whole: list[dict[str, Any]]) -> None:
    """With SIGUSR1 in the middle."""
    job = submit(folder, seconds_per_step=0.3)
    wait_for(f"step {PREEMPTED_AT}", lambda: len(read_losses(folder)) > PREEMPTED_AT, job, folder)
    subprocess.run(["scancel", "--signal=USR1", str(job)], check=True)
    print(f"SIGUSR1 to job {job} in step {read_losses(folder)[-1]['step']}")
    wait_for("the job to be queued again and to end", lambda: job_state(job) == "COMPLETED", job, folder)
    seen = read_losses(folder)
    starts = [each["start"] for each in seen]
    check(set(starts) == {0, 1}, "the job was started again once", starts)
    checkpoints = sorted(path.name for path in folder.glob("hpc_ckpt_*.ckpt"))
    check(checkpoints == ["hpc_ckpt_1.ckpt"], "one checkpoint was saved", checkpoints)
    saved = read_saved_step(folder / checkpoints[0])
    again = [each for each in seen if each["start"] == 1]
    check(again[0]["step"] == saved, f"the second start went on at step {saved}, where the checkpoint was", again[0])
    check(again[-1]["step"] == STEPS - 1, f"and ended with step {STEPS - 1}", again[-1])
    expected = {each["step"]: each["loss"] for each in whole}
    worst = max(abs(each["loss"] / expected[each["step"]] - 1) for each in seen)
    check(worst < 1e-6, f"losses are those of the run without interruption (largest difference {worst:.1e})", seen)


def check_wrong_task_count_fails(folder: Path) -> None:
    """One task a node for a Trainer with two devices: an error, and no rank waits for one that is not there."""
    job = submit(folder, seconds_per_step=0.0, tasks_per_node=1)
    wait_for("the wrong number of tasks to be refused", lambda: job_state(job) == "FAILED", job, folder)
    text = (folder / "out.txt").read_text()
    words = f"You set `devices={DEVICES}` in Lightning, but the number of tasks per node configured in SLURM"
    check(words in text, "Lightning says that --ntasks-per-node=1 and devices=2 contradict each other", text)


def submit(folder: Path, seconds_per_step: float, tasks_per_node: int = DEVICES) -> int:
    """The example's script with this test's training, and with numbers that fit on this machine."""
    folder.mkdir()
    options = [f"--nodes={NODES}", f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1", "--time=10"]
    command = [sys.executable, str(Path(__file__).with_name("train.py")), str(folder), str(STEPS)]
    command += [str(seconds_per_step), str(DEVICES)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    script = str(ROOT / "examples" / "slurm" / "train.sbatch")
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={folder}/out.txt", *options, script, *command],
        check=True, capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout)


def job_state(job: int) -> str:
    """As SLURM names it: PENDING, RUNNING, COMPLETED, ..."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", str(job)], capture_output=True, text=True)
    return next((word[9:] for word in done.stdout.split() if word.startswith("JobState=")), "UNKNOWN")


def read_losses(folder: Path) -> list[dict[str, Any]]:
    """What the first rank has written."""
    file = folder / "losses-0.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def read_saved_step(checkpoint: Path) -> int:
    """Optimizer steps that a checkpoint has behind it."""
    code = f"import torch; print(torch.load({str(checkpoint)!r}, weights_only=False)['global_step'])"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def wait_for(what: str, happened: Callable[[], bool], job: int, folder: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not happened():
        ended = job_state(job) in ("FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        if time.monotonic() > end or (ended and not happened()):
            text = (folder / "out.txt").read_text() if (folder / "out.txt").exists() else ""
            sys.exit(f"waited in vain for {what}; job {job} is {job_state(job)}:\n{text[-5000:]}")
        time.sleep(0.2)


def check(holds: bool, what: str, seen: object) -> None:
    if not holds:
        sys.exit(f"does not hold: {what}; seen: {seen}")
    print(f"ok: {what}")


if __name__ == "__main__":
    main()
