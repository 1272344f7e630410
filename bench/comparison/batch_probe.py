"""Which batch sizes to try next: doubling until a rank is killed, then narrowing between the two. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

LARGEST = 96
"""Per rank. Without recomputing, throughput is flat long before on these machines; with it, deep and narrow models
still gain 4 % between 64 and this over a slow link."""

FLAT = 1.02
"""A larger batch size that makes less than this many times the samples is no better."""

SLOW_STEP_S = 4.0
"""Of steps that take longer, no more are measured (but two) than take the time of the usual number of this length: they
vary less, and a recomputing system's largest batch sizes, of up to 23 s a step, would take most of a comparison's."""

WARM_UP, SLOW_WARM_UP = 3, 2
"""Steps of a final that are not counted, and the same where they are slow, or in a search."""


START_S, LONGER = 40.0, 1.4
"""What a process takes before its first step, and by how much longer than known its steps may be."""


def fewer(steps: int, step_s: float) -> int:
    """How many of ``hull_step_counts`` steps to measure if one takes about ``step_s`` seconds (0: not known)."""
    return min(steps, max(2, round(steps * SLOW_STEP_S / step_s))) if step_s else steps


def time_for(steps: int, step_s: float) -> float:
    """Seconds that a process may take for so many steps of about ``step_s``, which may be known from a search, from
    a faster link, or by those of other sizes."""
    return START_S + LONGER * steps * step_s


def longest_step(steps_s: Mapping[int, float], size: int) -> float:
    """Seconds that a step of batch size ``size`` takes at most, going by those of others; 0 if none is known.

    Args:
        steps_s: batch size -> seconds of a step, which grow no faster than the batch size.
    """
    if not steps_s:
        return 0.0
    return max(steps_s.values()) * max(1.0, size / max(steps_s))


def is_flat(rates: Sequence[float]) -> bool:
    """Whether the last two of ascending batch sizes were no better than those before. One alone may be a slow moment
    of the machine: DDP once stood at batch size 4 that way, with 8 and 16 to come.

    Args:
        rates: samples per second of each.
    """
    return len(rates) > 2 and max(rates[-2:]) < FLAT * max(rates[:-2])


def next_sizes(lived: int, dead: int | None, estimate: int | None = None, largest: int = LARGEST) -> tuple[int, ...]:
    """Batch sizes for one process to try in ascending order until it is killed; none once the limit is known.

    Args:
        lived: largest size known to live; 0 if none.
        dead: smallest size known to die; None if none.
        estimate: about the largest size that will live, if known from elsewhere.
        largest: not beyond this.
    """
    if dead is None:
        if not lived and estimate:
            around = {max(1, estimate // 2), estimate, estimate + max(1, estimate // 8)}
            return tuple(sorted(size for size in around if size <= largest))
        return _doubling(2 * lived or 1, largest) or ((largest,) if lived < largest else ())
    if dead - lived <= max(1, lived // 8):  # the last eighth of a batch size gains next to nothing
        return ()
    if not lived:
        return _doubling(1, dead - 1)
    step = max(1, (dead - lived) // 4)
    return tuple(range(lived + step, dead, step))


def _doubling(start: int, stop: int) -> tuple[int, ...]:
    sizes = []
    while start <= stop:
        sizes.append(start)
        start *= 2
    return tuple(sizes)


def gains_nothing(steps_s: Mapping[int, float], dead: int) -> bool:
    """Whether no batch size below ``dead`` promises ``FLAT`` times the samples of those known.

    Told by the flattest of lines through two of the three largest, from the one that it lies lowest through: a slow
    moment in one of them ends no search.

    Args:
        steps_s: batch size -> seconds of a step.
        dead: smallest size known to die.
    """
    known = sorted(steps_s)[-3:]
    if len(known) < 3:
        return False
    slope = min((steps_s[b] - steps_s[a]) / (b - a) for a, b in combinations(known, 2))
    size = dead - 1
    predicted_s = min(steps_s[one] + slope * (size - one) for one in known)
    return predicted_s > 0 and size / predicted_s < FLAT * max(size / step_s for size, step_s in steps_s.items())


def estimate_largest(peaks: Mapping[int, int], memory_bytes: int) -> int | None:
    """Batch size whose peak reaches ``memory_bytes``, by the line through the smallest and the largest size known.

    Args:
        peaks: batch size -> bytes, measured elsewhere.
        memory_bytes: the limit.
    """
    if len(peaks) < 2:
        return None
    first, last = min(peaks), max(peaks)
    slope = (peaks[last] - peaks[first]) / (last - first)
    if slope <= 0:
        return None
    return min(LARGEST, max(1, int((memory_bytes - peaks[first]) / slope) + first))
