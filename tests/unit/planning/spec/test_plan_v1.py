"""Plans of version 1, made by the release that wrote them, read as that release read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.planning.spec.choices import WEIGHT_MODES
from lightning_osdp.planning.spec.cluster import Cluster, CollectiveFit
from lightning_osdp.planning.spec.plan import PLAN_VERSION, ChoiceCost, ExecutionPlan, OperatorPlan
from lightning_osdp.planning.spec.plan_v1 import upgrade_cluster, upgrade_plan

FOLDER = Path(__file__).parents[3] / "fixtures" / "plans_v1"
EXPECTED: dict[str, dict[str, Any]] = json.loads((FOLDER / "EXPECTED.json").read_text())
"""What the old code said of each file, in words of no version."""


def read(name: str) -> ExecutionPlan:
    return ExecutionPlan.from_json((FOLDER / name).read_text(), name)


def choice_facts(choice: OperatorPlan | ChoiceCost) -> dict[str, Any]:
    return {
        "slices": [str(mode) for mode in choice.slices],
        "split_dim": choice.split_dim,
        "scope": str(choice.sharding_group),
        "two_stage": choice.hierarchical,
    }


def fit_facts(fit: CollectiveFit) -> dict[str, float]:
    return {
        "one_tensor_of_1e6_bytes_on_4_ranks_s": fit.time_s(1e6, 4),
        "three_tensors_of_1e6_bytes_on_4_ranks_s": fit.time_s(1e6, 4, tensors=3),
        "hidden_of_three_tensors_s": fit.overlapped_part().time_s(1e6, 4, tensors=3),
        "residual": fit.residual,
    }


def cluster_facts(cluster: Cluster) -> dict[str, Any]:
    fits = {name: getattr(cluster.link, name) for name in ("all_reduce", "all_gather", "reduce_scatter")}
    if cluster.hierarchical_links is not None:
        scopes = {"inside": cluster.hierarchical_links.intra_node, "two_stage": cluster.hierarchical_links.hierarchical}
        for scope, link in scopes.items():
            fits |= {f"{scope}.{name}": getattr(link, name) for name in ("all_gather", "reduce_scatter")}
        fits["between.all_reduce"] = cluster.hierarchical_links.inter_node
    calibration = cluster.engine.calibration
    return {
        "ranks": cluster.ranks,
        "nodes": cluster.nodes,
        "devices_per_node": cluster.devices_per_node,
        "devices_by_node_where_uneven": list(cluster.devices_by_node),
        "device": cluster.device,
        "backend": cluster.backend,
        "overlap": cluster.overlap,
        "prefetch_max_bytes": cluster.prefetch_max_bytes,
        "supports_prefetch": cluster.supports_prefetch,
        "uses_ring_collectives": cluster.uses_ring_collectives,
        "has_two_levels": cluster.is_hierarchical,
        "has_levels": cluster.hierarchical_links is not None,
        "reduce_scatter_copy": cluster.reduce_scatter_copy_factor,
        "reduce_buffer_bytes": cluster.reduce_scatter_buffer_bytes,
        "all_reduce_buffer_bytes": cluster.all_reduce_buffer_bytes,
        "collectives": {name: fit_facts(fit) for name, fit in fits.items()},
        "engine_of_1e6_bytes_s": {str(mode): getattr(cluster.engine, mode.value).time_s(1e6) for mode in WEIGHT_MODES},
        "calibration": {
            "dp": calibration.dp,
            "zdp2": calibration.zdp2,
            "zdp": calibration.zdp,
            "joined": calibration.wrapped,
            "split": calibration.split,
            "node": calibration.node,
            "two_stage": calibration.hierarchical,
        },
        "calibration_of_split_zdp": calibration.for_kinds(("zdp", "split")),
    }


def operator_facts(plan: ExecutionPlan) -> dict[str, Any]:
    costs = ("time_s", "resident_bytes", "transient_bytes")
    return {
        "num_operators": len(plan.operators),
        "names": [op.name for op in plan.operators],
        "modes": [[str(mode) for mode in op.slices] for op in plan.operators],
        "choices": [choice_facts(op) for op in plan.operators],
        "units": [op.unit for op in plan.operators],
        "in_recomputed_block": [op.is_recomputed for op in plan.operators],
        "operator_parameters": [op.num_parameters for op in plan.operators],
        "why_replicated": [op.replicated_reason for op in plan.operators],
        "why_unsplittable": [op.unsplittable_reason for op in plan.operators],
        "alternatives": [
            [choice_facts(one) | {name: getattr(one, name) for name in costs} for one in op.alternatives]
            for op in plan.operators
        ],
        "blocks": [
            {
                "name": block.name,
                "kind": block.kind,
                "recomputed": block.recomputed,
                "why_not_recomputed": block.recompute_blocker,
                "decided_by_user": block.user_requested,
                "recomputing_frees_bytes": block.recompute_saves_bytes,
                "recomputing_adds_s": block.time_s,
                "operators_in_its_unit": block.num_wrapped,
                "its_unit_saves_s": block.wrapping_saves_s,
                "all_such_units_add_bytes": block.wrapping_bytes,
            }
            for block in plan.blocks
        ],
    }


def plan_facts(plan: ExecutionPlan) -> dict[str, Any]:
    predicted, peak, stop = plan.predicted, plan.peak, plan.search_stop
    return {
        "fingerprint": plan.model.fingerprint,
        "num_parameters": plan.model.num_parameters,
        "flops_per_sample": plan.model.flops_per_sample,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "batch_size": plan.batch_size,
        "accumulate_grad_batches": plan.accumulate_grad_batches,
        "global_batch_size": plan.global_batch_size,
        "step_time_s": predicted.step_time_s,
        "compute_time_s": predicted.compute_time_s,
        "communication_time_s": predicted.communication_time_s,
        "samples_per_s": predicted.samples_per_s,
        "peak_memory_bytes": predicted.peak_memory_bytes,
        "overhead_bytes": predicted.overhead_bytes,
        "saving_memory_bytes": predicted.saving_memory_bytes,
        "evaluation_memory_bytes": predicted.evaluation_memory_bytes,
        "heap_spare_bytes": predicted.heap_headroom_bytes,
        "most_memory_bytes": predicted.max_memory_bytes,
        "between_steps": predicted.non_training_bytes,
        "recomputed": list(plan.recomputed),
        "updates_in_backward": plan.update_in_backward,
        "retains_freed_memory": plan.retain_freed_memory,
        "frontier": [[point.batch_size, point.samples_per_s, point.peak_memory_bytes] for point in plan.frontier],
        "seconds_per_byte_of_memory": plan.memory_shadow_price,
        "peak": None if peak is None else peak.model_dump() | {"heap_share_of_freed": peak.heap_growth},
        "search_end": None if stop is None else [stop.reason, stop.batch_size, stop.needed_bytes],
    }


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_plan_v1_reads_as_the_old_release_read_it(name: str) -> None:
    plan = read(name)
    found = cluster_facts(plan.cluster) | operator_facts(plan) | plan_facts(plan)
    assert found == EXPECTED[name]
    assert found.keys() == EXPECTED[name].keys()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_plan_v1_is_written_as_version_3_and_survives_it(name: str) -> None:
    plan = read(name)
    assert plan.version == PLAN_VERSION == 3
    assert ExecutionPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_cluster_from_json_reads_old_and_new_keys(name: str) -> None:
    data = json.loads((FOLDER / name).read_text())["cluster"]
    cluster = Cluster.from_json(json.dumps(data))
    assert cluster == read(name).cluster
    assert Cluster.from_json(cluster.model_dump_json()) == cluster


def test_upgrade_of_new_keys_changes_nothing() -> None:
    plan = json.loads(read("multi_node_scopes.json").to_json())
    assert upgrade_cluster(plan["cluster"]) == plan["cluster"]


def test_upgrade_plan_leaves_its_argument_and_tolerates_missing_keys() -> None:
    assert upgrade_plan({"version": 1}) == {"version": 2}
    data = {"version": 1, "operators": [{"pinned": "tied"}], "blocks": [{"pinned": "hooks"}], "levels": 1}
    assert upgrade_plan(data) == {
        "version": 2,
        "operators": [{"replicated_reason": "tied"}],
        "blocks": [{"recompute_blocker": "hooks"}],
        "levels": 1,
    }
    assert data["version"] == 1


@pytest.mark.parametrize("version", [0, 4, "1", "2", 2.0, True, None])
def test_plan_of_another_version_is_refused(version: object) -> None:
    data = json.loads((FOLDER / "bare.json").read_text()) | {"version": version}
    with pytest.raises(PlanMismatchError, match=f"has version {version}, this release reads versions up to 3"):
        ExecutionPlan.from_json(json.dumps(data))


def test_plan_v1_with_unknown_key_is_refused() -> None:
    data = json.loads((FOLDER / "bare.json").read_text()) | {"keep_haep": True}
    with pytest.raises(ConfigurationError, match="is damaged: field keep_haep"):
        ExecutionPlan.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["not json {", "[]", '{"nodes": 2}'])
def test_cluster_from_json_refuses_other_files(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|Cluster"):
        Cluster.from_json(text)
