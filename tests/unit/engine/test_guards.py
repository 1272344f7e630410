"""Which steps of an optimizer are watched for ops that mix elements, and what is refused there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_osdp.engine.guards import WATCHED_STEPS, RefuseMixing, _is_watched
from lightning_osdp.errors import ShardingError


class Late(torch.optim.Optimizer):
    """Divides by the largest element."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__([weight], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weight = self.param_groups[0]["params"][0]
        weight.div_(weight.max())


def test_later_steps_of_users_own_optimizers_are_watched_now_and_then() -> None:
    own = Late(torch.nn.Parameter(torch.ones(2)))
    assert all(_is_watched(own, step) for step in range(1, WATCHED_STEPS + 1))
    assert [step for step in range(WATCHED_STEPS + 1, 300) if _is_watched(own, step)] == [194, 291]
    assert not _is_watched(torch.optim.SGD(own.param_groups[0]["params"], lr=0.1), 1)


def test_watched_step_that_mixes_elements_is_refused_and_others_may_mix() -> None:
    own = Late(torch.nn.Parameter(torch.ones(2)))
    with RefuseMixing(own):
        assert torch.arange(3).sum() == 3  # not in its step
        with pytest.raises(ShardingError, match=r"Late.step\(\) mixes elements of sharded weights .*max"):
            own.step()
