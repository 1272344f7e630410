"""Amounts as people write and read them: ``8GiB``, ``12.3 ms``. Inside the package everything is bytes and seconds."""

from __future__ import annotations

import re

from lightning_osdp.errors import ConfigurationError

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    # Bare prefixes are binary, as in cgroup limits, `ulimit` and SLURM's --mem.
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", start=1)},
}

_ACCEPTED = (
    "a whole number of bytes, or a number with a unit: '8GiB', '900 MiB', '1.5GB', '16G' (KiB = K = 1024, KB = 1000)"
)


def parse_bytes(value: int | str) -> int:
    """An amount of memory in bytes, rounded down.

    Args:
        value: bytes, or text with a unit: ``KiB MiB GiB TiB`` and the bare ``K M G T`` count by 1024, ``KB MB GB TB``
            by 1000; upper or lower case.

    Raises:
        ConfigurationError: it is not of that form, or not above zero; says what was wrong and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigurationError(f"{value!r} is not an amount of memory (a {type(value).__name__}): give {_ACCEPTED}")
    amount = value if isinstance(value, int) else _parse_text(value)
    if amount <= 0:
        raise ConfigurationError(f"an amount of memory must be at least one byte, not {value!r}: give {_ACCEPTED}")
    return amount


def format_bytes(amount: float) -> str:
    """Bytes as people read them: ``512 B``, ``1.5 KiB``, ``900.0 MiB``, ``8.00 GiB``."""
    for unit, size, digits in (("B", 1, 0), ("KiB", 1 << 10, 1), ("MiB", 1 << 20, 1)):
        if round(amount / size, digits) < 1024:
            return f"{amount / size:.{digits}f} {unit}"
    return f"{amount / (1 << 30):.2f} GiB"


def format_seconds(seconds: float) -> str:
    """Seconds as people read them: ``0.045 ms``, ``12.3 ms``, ``1.25 s``, ``2 min 05 s``."""
    if round(seconds * 1e3, 3) < 1:
        return f"{seconds * 1e3:.3f} ms"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 2) < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_count(count: int) -> str:
    """A number of parameters as people read it: ``768``, ``98.3 K``, ``10.9 M``, ``1.50 B``."""
    for unit, size, digits in (("", 1, 0), (" K", 10**3, 1), (" M", 10**6, 1)):
        if round(count / size, digits) < 1000:
            return f"{count / size:.{digits}f}{unit}"
    return f"{count / 10**9:.2f} B"


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not an amount of memory: give {_ACCEPTED}")
    number, unit = match.groups()
    if unit.lower() not in _UNIT_BYTES:
        raise ConfigurationError(f"{text!r} has an unknown unit, {unit!r}: give {_ACCEPTED}")
    return int(float(number) * _UNIT_BYTES[unit.lower()]) if "." in number else int(number) * _UNIT_BYTES[unit.lower()]
