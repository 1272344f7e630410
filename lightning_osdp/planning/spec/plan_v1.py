"""Reader for plans and cluster files of earlier releases: renames keys of version 1 to today's.

Keys are renamed by path, because version 1 used some words for several things. Lists add nothing to a path.
"""

from __future__ import annotations

from typing import Any

_LEAST_CHANGE = -2 / 3
"""Least relative change that earlier releases applied."""

_CLUSTER_KEYS = {
    "ahead_bytes": "prefetch_max_bytes",
    "uneven": "devices_by_node",
    "reduce_copy": "reduce_scatter_copy_factor",
    "reduce_buffer_bytes": "reduce_scatter_buffer_bytes",
    "levels": "hierarchical_links",
    "levels.inside": "intra_node",
    "levels.between": "inter_node",
    "levels.two_stage": "hierarchical",
    "engine.excess": "calibration",
    "engine.excess.joined": "wrapped",
    "engine.excess.two_stage": "hierarchical",
    **{
        f"{fit}.{old}": new
        for fit in (
            *(f"link.{name}" for name in ("all_reduce", "all_gather", "reduce_scatter")),
            *(
                f"levels.{scope}.{name}"
                for scope in ("inside", "two_stage")
                for name in ("all_gather", "reduce_scatter")
            ),
            "levels.between",
        )
        for old, new in (("more_s", "extra_tensor_latency_s"), ("hidden", "overlap_fraction"))
    },
}

_PLAN_KEYS = {
    "keep_heap": "retain_freed_memory",
    "price_s_per_byte": "memory_shadow_price",
    "search_end": "search_stop",
    "predicted.heap_spare_bytes": "heap_headroom_bytes",
    "operators.two_stage": "hierarchical",
    "operators.checkpoint": "is_recomputed",
    "operators.pinned": "replicated_reason",
    "operators.unsplittable": "unsplittable_reason",
    "operators.alternatives.two_stage": "hierarchical",
    "blocks.pinned": "recompute_blocker",
    "blocks.wished": "user_requested",
    "blocks.saved_bytes": "recompute_saves_bytes",
    "blocks.joined": "num_wrapped",
    "blocks.joining_s": "wrapping_saves_s",
    "blocks.joining_bytes": "wrapping_bytes",
    **{f"cluster.{path}": new for path, new in _CLUSTER_KEYS.items()},
}


def upgrade_plan(data: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a version-1 plan with the keys of version 2."""
    return {**_rename_keys(data, _PLAN_KEYS), "version": 2}


def upgrade_cluster(data: Any) -> Any:
    """Return the JSON value of a cluster file of any version with today's keys."""
    return _rename_keys(data, _CLUSTER_KEYS)


def raise_negative_times(cluster: Any) -> Any:
    """Return the JSON value of a cluster whose engine takes no negative times, as earlier releases measured them."""
    if not isinstance(cluster, dict) or not isinstance(cluster.get("engine"), dict):
        return cluster

    def clamp(part: Any, least: float) -> Any:
        if not isinstance(part, dict):
            return part
        return {key: max(least, value) if isinstance(value, int | float) else value for key, value in part.items()}

    least = {"calibration": _LEAST_CHANGE}
    engine = {name: clamp(part, least.get(name, 0.0)) for name, part in cluster["engine"].items()}
    return {**cluster, "engine": engine}


def _rename_keys(value: Any, renamed: dict[str, str], prefix: str = "") -> Any:
    if isinstance(value, list):
        return [_rename_keys(item, renamed, prefix) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        renamed.get(prefix + key, key): _rename_keys(inner, renamed, f"{prefix}{key}.") for key, inner in value.items()
    }
