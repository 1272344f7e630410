"""The store of a process group whose other ranks are not there."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_osdp.errors import ConfigurationError

_Store: Any = getattr(dist, "Store")  # noqa: B009 (its stub is missing)


class AbsentRanksStore(_Store):  # type: ignore[misc]
    """A dictionary that never waits: what is not in it would have to come from ranks that are not there.

    Args:
        ranks: the number of ranks, for the error.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value that was written.

        Raises:
            ConfigurationError: it was not.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are there."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return if all keys are there.

        Raises:
            ConfigurationError: another rank would have to write them.
        """
        missing = [key for key in keys if key not in self._values]
        if missing:
            raise ConfigurationError(
                f"this process stands for all {self._ranks} ranks of an emulated cluster, and waits for one that is "
                f"not there ({missing[0]}): groups of other backends are not emulated"
            )

    def delete_key(self, key: str) -> bool:
        """Remove a key and return whether it was there."""
        return self._values.pop(key, None) is not None

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Write ``desired`` if the value is ``expected``, and return the value that is there then."""
        expected, desired = (_to_bytes(one) for one in (expected, desired))
        if self._values.get(key, b"" if not expected else None) == expected:
            self._values[key] = desired
        return bytes(self._values.get(key, expected))

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: there are ``append``, ``multi_get`` and ``multi_set``."""
        return True

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: nothing is waited for."""


def _to_bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
