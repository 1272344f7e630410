"""Errors of one rank reach all ranks, also where others wait for it in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from lightning_osdp.backend import agree
from lightning_osdp.errors import OSDPError, RecoverableError, message_of
from tests.support.odd_errors import ODD_ERRORS
from tests.support.ranks import run_ranks

RANKS = 2


def fail(message: str) -> None:
    raise ValueError(message)


def raise_made(make: Callable[[], Exception]) -> None:
    raise make()


def fail_in_trial() -> None:
    try:
        fail("row 7 is bad")
    except ValueError as error:
        raise RecoverableError("rank failed: ValueError: row 7 is bad") from error


def outcome(work: Any) -> tuple[str, str]:
    """The type and the text of the error that ``work`` ends with on this rank."""
    try:
        agree.raise_on_all_ranks(dist.group.WORLD, work)
    except Exception as error:
        return type(error).__name__, message_of(error)
    return "", ""


def run_agreements(rank: int, ranks: int, failing: int) -> dict[str, Any]:
    """Errors that leave the group in step, and at last one that does not."""
    results: dict[str, Any] = {
        "none": outcome(lambda: None),
        "one": outcome(lambda: fail("bad") if rank == failing else None),
        "odd": {
            kind: outcome(lambda make=make: raise_made(make) if rank == failing else None)  # type: ignore[misc]
            for kind, (make, _) in ODD_ERRORS.items()
        },
        "all": outcome(lambda: fail(f"bad on {rank}")),
        "trial on all": outcome(fail_in_trial),
        "again": outcome(dist.barrier),
    }
    began_s = time.monotonic()
    results["apart"] = outcome(fail_in_trial if rank == failing else dist.barrier)
    dist.destroy_process_group()
    results["seconds"] = time.monotonic() - began_s
    return results


@pytest.mark.parametrize("failing", range(RANKS))
def test_error_on_one_rank_is_raised_on_all_ranks(failing: int) -> None:
    results = run_ranks(run_agreements, RANKS, failing, timeout_s=120)
    for rank, result in enumerate(results):
        assert result["none"] == result["again"] == ("", "")
        assert result["all"] == ("ValueError", f"bad on {rank}")
        assert result["trial on all"][0] == RecoverableError.__name__
        assert result["seconds"] < 20
    failed, other = results[failing], results[1 - failing]
    assert failed["one"] == ("ValueError", "bad")
    assert other["one"] == (OSDPError.__name__, f"rank {failing} failed: ValueError: bad")
    for kind, (make, said) in ODD_ERRORS.items():
        assert failed["odd"][kind][0] == type(make()).__name__
        assert other["odd"][kind][0] == OSDPError.__name__
        assert other["odd"][kind][1].startswith(f"rank {failing} failed: {said}")
    # The other rank waited in a collective: no trial can be left out, and both end.
    assert failed["apart"] == ("ValueError", "row 7 is bad")
    assert other["apart"] == (OSDPError.__name__, "rank failed: ValueError: row 7 is bad")
