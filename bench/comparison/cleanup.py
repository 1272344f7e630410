"""Namespaces, bridges and cgroups of earlier comparisons that were killed before they could clean up."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from bench.multinode import emulated_cluster

NAME = re.compile(r"^bench(\d+)(n|r|br|p)\d*$")


def remove() -> None:
    """Removes what belongs to processes that no longer run."""
    namespaces = Path("/var/run/netns")
    for path in namespaces.iterdir() if namespaces.exists() else ():
        if is_left_over(path.name):
            subprocess.run(["ip", "netns", "del", path.name], check=True)
    for path in Path("/sys/class/net").iterdir():
        if is_left_over(path.name) and path.name.endswith("br"):
            subprocess.run(["ip", "link", "del", path.name], check=True)
    for path in emulated_cluster.CGROUPS.glob("bench*") if emulated_cluster.CGROUPS.exists() else ():
        if is_left_over(path.name):
            emulated_cluster.remove_cgroup(path)


def is_left_over(name: str) -> bool:
    """Whether a name is of a comparison whose process has ended."""
    match = NAME.match(name)
    return match is not None and not Path(f"/proc/{match[1]}").exists()
