"""Fits of the cost model's constants to measured collectives: non-negative least squares with two unknowns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_osdp.planning.spec.cluster import CollectiveFit

TIME_RANGE_S = (1e-9, 1e9)
"""Range that measured times are limited to, so that squares of their inverses stay finite."""


def fit_collective(sizes_bytes: Sequence[float], times_s: Sequence[float], ranks: int) -> CollectiveFit:
    """Return the latency and inverse bandwidth that explain measured times best.

    Minimises ``sum(((predicted - measured) / measured) ** 2)`` over the constants of the paper's equation 2,
    ``predicted = (N - 1) (latency_s + s_per_byte * P / N)``, with both constants at least 0. The error is relative, so
    that small and large sizes count equally.

    Args:
        sizes_bytes: P, bytes of the unsharded tensor, at least two different sizes.
        times_s: Measured seconds for each size, positive.
        ranks: N. On a single rank nothing is sent and the fit is all zeros.

    Returns:
        The constants, and the root mean square of the relative errors that remain.

    Raises:
        ValueError: Fewer than two different sizes, lists of different lengths, or a time that is not positive.
    """
    if ranks == 1:
        return CollectiveFit(latency_s=0.0, s_per_byte=0.0)
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    if sizes.shape != times.shape or len(set(sizes.tolist())) < 2:
        raise ValueError(f"need times at two different sizes at least, got {len(times)} at sizes {list(sizes_bytes)}")
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise ValueError(f"times must be positive: {list(times_s)}")
    # Divided by the measured times, the errors are relative and the right-hand side is all ones.
    times = np.clip(times, *TIME_RANGE_S)
    columns = np.stack([np.full_like(sizes, ranks - 1), (ranks - 1) * sizes / ranks], axis=1) / times[:, None]
    scale = np.linalg.norm(columns, axis=0)  # the columns have other units: unscaled, the problem is ill-conditioned
    constants = np.linalg.lstsq(columns / scale, np.ones(len(columns)), rcond=None)[0] / scale
    if (constants < 0).any():  # then the constrained minimum lies on an axis, where it is a ratio of sums
        on_axes = np.diag(columns.sum(axis=0) / (columns**2).sum(axis=0))
        constants = min(on_axes, key=lambda x: float(np.sum((columns @ x - 1) ** 2)))
    residual = float(np.sqrt(np.mean((columns @ constants - 1) ** 2)))
    return CollectiveFit(latency_s=float(constants[0]), s_per_byte=float(constants[1]), residual=residual)
