"""Fits the constants of the cost model to measurements: non-negative least squares for two unknowns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_osdp.planning.spec.cluster import CollectiveFit


def fit_collective(sizes_bytes: Sequence[float], times_s: Sequence[float], ranks: int) -> CollectiveFit:
    """Latency and inverse bandwidth that explain measured times best.

    Minimises ``sum(((predicted - measured) / measured) ** 2)`` over the constants of the paper's equation 2,
    ``predicted = (N - 1) (latency_s + s_per_byte * P / N)``, with both constants at least 0. The error is relative, so
    that the smallest size has the same say as the largest.

    Args:
        sizes_bytes: P, bytes of the whole tensor, at least two different sizes.
        times_s: seconds measured for each size, positive.
        ranks: N. On a single rank nothing is sent and the fit is all zeros.

    Returns:
        The constants, and the root mean square of the relative errors that remain.

    Raises:
        ValueError: fewer than two different sizes, lists of different lengths, or a time that is not positive.
    """
    if ranks == 1:
        return CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2:
        raise ValueError(f"need times at two different sizes at least, got {len(times)} at sizes {list(sizes_bytes)}")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError(f"times must be positive: {list(times_s)}")
    # Divided by the measured times, the errors are relative ones and the right-hand side is all ones.
    columns = np.stack([np.full_like(sizes, ranks - 1), (ranks - 1) * sizes / ranks], axis=1) / times[:, None]
    latency_s, s_per_byte = _solve_nonnegative(columns)
    residual = float(np.sqrt(np.mean((columns @ np.array([latency_s, s_per_byte]) - 1) ** 2)))
    return CollectiveFit(latency_s=latency_s, s_per_byte=s_per_byte, residual=residual)


def _solve_nonnegative(columns: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The x >= 0 that minimises ``|columns @ x - 1|``, for an (n, 2) matrix of non-negative numbers.

    If the free minimum has a negative entry, the constrained one lies on an axis, where it is a ratio of sums.
    """
    scale = np.linalg.norm(columns, axis=0)  # seconds against seconds per byte: unscaled, nearly singular
    target = np.ones(len(columns))
    free = np.linalg.lstsq(columns / scale, target, rcond=None)[0] / scale
    if (free >= 0).all():
        return float(free[0]), float(free[1])
    alone = columns.sum(axis=0) / (columns**2).sum(axis=0)
    on_axes = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    best = min(on_axes, key=lambda x: float(np.sum((columns @ x - 1) ** 2)))
    return float(best[0]), float(best[1])
