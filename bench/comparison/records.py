"""What was run, kept in a file as it comes in: a comparison that was stopped goes on where it was."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.comparison.jobs import Job

ROOT = Path(__file__).resolve().parents[2]


class Runs:
    """Runs each job once; asked again, answers from the file.

    Args:
        file: one JSON object a line: job, result, commit, date. Made where there is none.
        run: runs a job and returns its result.
        tell: is told of each result that was not there yet.
    """

    def __init__(
        self, file: Path, run: Callable[[Job], dict[str, Any]], tell: Callable[[Job, dict[str, Any]], None]
    ) -> None:
        self._file, self._run, self._tell = file, run, tell
        self._known: dict[str, dict[str, Any]] = {}
        self.commits: set[str] = set()
        file.parent.mkdir(parents=True, exist_ok=True)
        for line in _whole_lines(file):
            record = json.loads(line)
            if record["result"]["outcome"] != "failed":  # perhaps it does not any more
                self._known[_text(record["job"])] = record["result"]
            self.commits.add(record["commit"])

    def get(self, job: Job) -> dict[str, Any]:
        """The job's result."""
        text = _text(job.key)
        if text not in self._known:
            result = self._run(job)
            commit = current_commit()
            record = {"job": job.key, "result": result, "commit": commit, "when": time.strftime("%F %T")}
            with self._file.open("a") as out:
                out.write(json.dumps(record) + "\n")
            self._known[text] = result
            self.commits.add(commit)
            self._tell(job, result)
        return self._known[text]


def current_commit() -> str:
    """Of this checkout, with a mark if it was changed since."""
    call = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(call, capture_output=True, text=True).stdout.strip() or "unknown"


def _whole_lines(file: Path) -> list[str]:
    """Lines of the file. One that is cut off was being written when the comparison was stopped: it is removed."""
    text = file.read_text() if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return whole.splitlines()


def _text(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)
