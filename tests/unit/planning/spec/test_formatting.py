"""Amounts of memory: what is read, and what is refused with words that help."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planning.spec.formatting import parse_bytes, parse_memory_limit


@pytest.mark.parametrize(
    ("value", "expected_bytes"),
    [
        (1, 1),
        (8 << 30, 8 << 30),
        ("4096", 4096),
        ("512B", 512),
        ("64KiB", 64 << 10),
        ("900 MiB", 900 << 20),
        ("8GiB", 8 << 30),
        (" 8 gib ", 8 << 30),
        ("0.5 TiB", 1 << 39),
        ("1.5GB", 1_500_000_000),
        ("3kb", 3_000),
        ("16G", 16 << 30),
        ("16g", 16 << 30),
        ("2T", 2 << 40),
    ],
)
def test_parse_bytes_reads_numbers_and_units(value: int | str, expected_bytes: int) -> None:
    assert parse_bytes(value) == expected_bytes


@pytest.mark.parametrize(
    ("value", "expected"),
    [("auto", (None, 1.0)), ("90%", (None, 0.9)), (" 12.5 % ", (None, 0.125)), ("1GiB", (1 << 30, 1.0)), (5, (5, 1.0))],
)
def test_parse_memory_limit_reads_amounts_and_shares(value: int | str, expected: tuple[int | None, float]) -> None:
    assert parse_memory_limit(value) == expected


@pytest.mark.parametrize("value", ["0%", "101%", "-5%", "%", "x%", "1e1%"])
def test_parse_memory_limit_rejects_shares_that_are_none(value: str) -> None:
    with pytest.raises(ConfigurationError, match="no share of a device's memory: give '90%'"):
        parse_memory_limit(value)


@given(st.integers(min_value=1, max_value=1 << 53))
def test_parse_bytes_keeps_whole_numbers_exact(amount: int) -> None:
    assert parse_bytes(amount) == parse_bytes(str(amount)) == parse_bytes(f"{amount} B") == amount
    assert parse_bytes(f"{amount}KiB") == amount * 1024


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("8 gigs", "unknown unit, 'gigs'"),
        ("8 Gbit", "unknown unit, 'Gbit'"),
        ("", "'' is not an amount"),
        ("GiB", "'GiB' is not an amount"),
        ("8 GiB of it", "'8 GiB of it' is not an amount"),
        ("-1GiB", "'-1GiB' is not an amount"),
        ("1e9", "'1e9' is not an amount"),
        ("8,5GiB", "'8,5GiB' is not an amount"),
        ("nan", "'nan' is not an amount"),
        (0, "at least one byte, not 0"),
        (-5, "at least one byte, not -5"),
        ("0GiB", "at least one byte, not '0GiB'"),
        ("0.5B", "at least one byte, not '0.5B'"),
        (8.0, "a float"),
        (True, "a bool"),
        (None, "a NoneType"),
    ],
)
def test_parse_bytes_rejects_invalid_values_and_names_accepted_forms(value: object, what: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(value)  # type: ignore[arg-type]
    assert what in str(caught.value)
    assert "'8GiB', '900 MiB', '1.5GB', '16G'" in str(caught.value)
