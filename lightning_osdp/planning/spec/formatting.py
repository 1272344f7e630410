"""Amounts as people write and read them: ``8GiB``, ``12.3 ms``. Inside the package everything is bytes and seconds."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter, ValidationError

from lightning_osdp.errors import ConfigurationError

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)

MAX_BYTES = 1 << 100
"""The largest amount of memory that is taken for one."""

_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")

_ACCEPTED = (
    "a whole number of bytes, or a number with a unit: '8GiB', '900 MiB', '1.5GB', '16G' (KiB = K = 1024, KB = 1000)"
)


def parse_bytes(value: int | str) -> int:
    """Return an amount of memory in bytes, rounded down.

    Args:
        value: Bytes, or text with a unit in upper or lower case. ``KiB MiB GiB TiB`` and the bare ``K M G T`` count by
            1024, ``KB MB GB TB`` by 1000.

    Raises:
        ConfigurationError: It has another form, or is not above zero; says what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigurationError(f"{value!r} is not an amount of memory (a {type(value).__name__}): give {_ACCEPTED}")
    amount = value if isinstance(value, int) else _parse_text(value)
    if amount <= 0:
        raise ConfigurationError(f"an amount of memory must be at least one byte, not {value!r}: give {_ACCEPTED}")
    if amount > MAX_BYTES:
        raise ConfigurationError(f"{value!r:.80} is more memory than any device has: give {_ACCEPTED}")
    return amount


def parse_memory_limit(value: int | str) -> tuple[int | None, float]:
    """Return a memory limit in bytes, or None and the share of the memory that a device has.

    Args:
        value: ``"auto"`` for all that the device has, ``"90%"`` for a share of it, or an amount as for ``parse_bytes``.

    Raises:
        ConfigurationError: It has another form, or the share is not above 0 and at most 100 percent.
    """
    if value == "auto":
        return None, 1.0
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return parse_bytes(value), 1.0
    match = _PERCENT.fullmatch(value)
    if match is None or not 0 < float(match[1]) <= 100:
        raise ConfigurationError(f"{value!r} is no share of a device's memory: give '90%', or {_ACCEPTED}")
    return None, float(match[1]) / 100


def format_bytes(amount: float) -> str:
    """Return bytes for people to read: ``512 B``, ``1.5 KiB``, ``900.0 MiB``, ``8.00 GiB``."""
    return _scale(amount, 1024, ((" B", 0), (" KiB", 1), (" MiB", 1), (" GiB", 2)))


def format_seconds(seconds: float) -> str:
    """Return seconds for people to read: ``0.045 ms``, ``12.3 ms``, ``1.25 s``, ``2 min 05 s``."""
    if round(seconds * 1e3, 3) < 1:
        return f"{seconds * 1e3:.3f} ms"
    if round(seconds * 1e3, 1) < 1000:
        return f"{seconds * 1e3:.1f} ms"
    if round(seconds, 2) < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def format_count(count: int) -> str:
    """Return a number of parameters for people to read: ``768``, ``98.3 K``, ``10.9 M``, ``1.50 B``."""
    return _scale(count, 1000, (("", 0), (" K", 1), (" M", 1), (" B", 2)))


def _scale(amount: float, base: int, units: tuple[tuple[str, int], ...]) -> str:
    """Return an amount in the first unit in which it is below ``base``; units have names and decimal digits."""
    fitting = (i for i, (_, digits) in enumerate(units) if round(amount / base**i, digits) < base)
    power = next(fitting, len(units) - 1)
    name, digits = units[power]
    return f"{amount / base**power:.{digits}f}{name}"


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{text!r} is not an amount of memory: give {_ACCEPTED}")
    number, unit = match.groups()
    # pydantic counts bare prefixes by 1000 and knows bits. cgroup limits, `ulimit` and SLURM's --mem count by 1024.
    known = f"{unit}iB" if unit.lower() in set("kmgt") else unit
    try:
        return int(TypeAdapter(ByteSize).validate_python("" if unit.lower().endswith("bit") else number + known))
    except ValidationError:
        raise ConfigurationError(f"{text!r} has an unknown unit, {unit!r}: give {_ACCEPTED}") from None
