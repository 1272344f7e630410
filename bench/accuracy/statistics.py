"""What several rounds of a prediction and its measurement come to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Round = tuple[float, float]
"""Seconds predicted and measured."""

STEADY = 0.05
"""Standard error of the mean of what rounds are off by, from which another is needed."""

MOST_ROUNDS = 5


def middle(rounds: Sequence[Round]) -> Round:
    """The round that is off by the median; of an even number the mean of two.

    What a machine does at the time makes a prediction and its measurement longer alike, which medians of each on their
    own would not know.
    """
    ordered = sorted(rounds, key=off)
    chosen = ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]
    predicted, measured = (statistics.fmean(times) for times in zip(*chosen, strict=True))
    return predicted, measured


def off(each: Round) -> float:
    """By how much the prediction is off, as a fraction of the measurement."""
    predicted, measured = each
    return predicted / measured - 1


def unsteady(rounds: Sequence[Round]) -> bool:
    """Whether two rounds or more are off by so different amounts that another has to say which are chance."""
    offs = [off(each) for each in rounds]
    return 1 < len(offs) < MOST_ROUNDS and statistics.stdev(offs) > STEADY * math.sqrt(len(offs))
