"""Imports the library as musl, macOS and Windows would show themselves to it, and prints what works there as JSON."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

# What the library stands on looks at the system by itself, and is not what is tried here.
import fairscale.nn  # noqa: F401
import jsonargparse  # noqa: F401
import lightning.pytorch.cli as lightning_cli
import psutil  # noqa: F401
import torch
import torch.distributed.checkpoint  # the library imports it on use; it needs glibc

MISSING_ON_WINDOWS = ("O_NOFOLLOW", "O_DIRECTORY", "O_CLOEXEC", "O_NONBLOCK", "sched_getaffinity", "sysconf", "getpgid")


def main() -> None:
    print(json.dumps({name: run_in_fork(system) for name, system in SYSTEMS.items()}))


def run_in_fork(fake_system: Any) -> Any:
    """What a fresh process answers that sees the faked system."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fake_system()
            answer = try_library()
        except BaseException:
            answer = {"error": traceback.format_exc()}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        answer = json.loads(stream.read())
    os.waitpid(child, 0)
    return answer


def fake_musl() -> None:
    def refuse(*args: Any, **named: Any) -> Any:
        raise OSError("libc.so.6: cannot open shared object file")

    ctypes.CDLL = refuse  # type: ignore[assignment, misc]


def fake_macos() -> None:
    sys.platform = "darwin"
    hide_proc()
    del os.sched_getaffinity


def fake_windows() -> None:
    sys.platform = "win32"
    hide_proc()
    sys.modules["resource"] = sys.modules["fcntl"] = None  # type: ignore[assignment]
    for name in MISSING_ON_WINDOWS:
        delattr(os, name)
    for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP"):
        delattr(signal, name)

    def refuse(name: Any, **named: Any) -> Any:
        raise TypeError("bad argument type for built-in operation")

    ctypes.CDLL = refuse  # type: ignore[assignment, misc]


def hide_proc() -> None:
    def is_shown(path: Any) -> bool:
        return not str(path).startswith(("/proc", "/sys"))

    exists, read_text, readlink = Path.exists, Path.read_text, os.readlink

    def read(path: Path, *args: Any, **named: Any) -> str:
        if not is_shown(path):
            raise FileNotFoundError(path)
        return read_text(path, *args, **named)

    def link(path: Any, *args: Any, **named: Any) -> str:
        if not is_shown(path):
            raise FileNotFoundError(path)
        return readlink(path, *args, **named)

    Path.exists = lambda path, **named: is_shown(path) and exists(path, **named)  # type: ignore[method-assign]
    Path.read_text, os.readlink = read, link  # type: ignore[method-assign, assignment]


def try_library() -> dict[str, Any]:
    import lightning_osdp

    names = [each.name for each in pkgutil.walk_packages(lightning_osdp.__path__, "lightning_osdp.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    from lightning_osdp.backend import allocator, liveness
    from lightning_osdp.backend.cpu import core_sharing, malloc, process_memory
    from lightning_osdp.cli import main
    from lightning_osdp.planning.whatif import hardware

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        allocator.configure(torch.device("cpu"))
    strategy = lightning_osdp.OSDPStrategy()
    refusal = ""
    if sys.platform == "win32":
        try:
            strategy.setup_environment()
        except lightning_osdp.ConfigurationError as error:
            refusal = str(error)
        process_memory.peak_resident_bytes = process_memory.resident_bytes  # psutil here has no field of Windows
    return {
        "modules": len(names),
        "resident": process_memory.resident_bytes(),
        "peak": process_memory.peak_resident_bytes(),
        "usable": process_memory.usable_bytes(1, 1),
        "is_heap_set": malloc.HEAP.can_retain,
        "warnings": [str(each.message) for each in caught if each.category is lightning_osdp.OSDPWarning],
        "is_alive": liveness.has_process(os.getpid()) and not liveness.is_dead(liveness.describe_process()),
        "cores": len(core_sharing._available_cores()),
        "hardware": hardware.load("h100-80gb-nvlink").devices,
        "version": main.main(["--version"]),
        "refusal": refusal,
        "cli": lightning_cli.__name__,
    }


SYSTEMS = {"musl": fake_musl, "macos": fake_macos, "windows": fake_windows}

if __name__ == "__main__":
    main()
