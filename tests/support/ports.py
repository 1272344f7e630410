"""Ports for ranks that are started as programs."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

PORTS = range(20000, 30000)
"""Below those that the system gives to connections (32768 and up on Linux): what is free now is still free when a
process that has to import its libraries first comes to listen."""


def free_port() -> int:
    """A TCP port of ``PORTS`` that nobody listens on."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("", port))
            return port
    raise OSError(f"none of 100 ports in {PORTS} is free")
