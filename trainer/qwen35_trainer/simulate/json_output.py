"""The JSON output of the commands (`--json`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qwen35_trainer.simulate.manifest_workload import AssumedConstant, describe_lengths
from qwen35_trainer.simulate.plan import PlanResult
from qwen35_trainer.simulate.plan_search import Trial
from qwen35_trainer.simulate.sweep import SkippedCombination, SweepAxis, SweepRow
from qwen35_trainer.simulate.workload import BatchPolicy, Workload


def run_json(row: SweepRow, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    """Return what `qwen35 simulate --json` prints for one workload."""
    return _head(row, constants) | {"result": row.result.as_dict()}


def sweep_json(
    axes: Sequence[SweepAxis],
    rows: Sequence[SweepRow],
    skipped: Sequence[SkippedCombination],
    constants: Sequence[AssumedConstant],
) -> dict[str, Any]:
    """Return what `qwen35 simulate --sweep --json` prints: one row per combination.

    The key `workload` describes the workload of the first row.
    """
    keys = [axis.key for axis in axes]
    return _head(rows[0], constants) | {
        "rows": [{"values": dict(zip(keys, row.values, strict=True)), "result": row.result.as_dict()} for row in rows],
        "leftOut": [
            {"values": dict(zip(keys, item.values, strict=True)), "problems": item.problems} for item in skipped
        ],
    }


def plan_json(plan: PlanResult, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    """Return what `qwen35 plan --json` prints: the plan, the unchanged manifest, and every neighbour of the plan."""
    best = plan.recommended.result.effective_throughput
    neighbours = [
        {
            "change": neighbour.change,
            "withinBound": neighbour.is_allowed,
            "throughputChange": neighbour.trial.result.effective_throughput / best - 1,
        }
        | _trial(neighbour.trial)
        for neighbour in plan.neighbours
    ]
    return {
        "set": plan.changes,
        "plan": _trial(plan.recommended),
        "manifest": _trial(plan.manifest),
        "neighbours": neighbours,
        "arithmetic": {"ideal": plan.estimate.ideal, "minStaleness": plan.estimate.min_staleness},
        "maxLag": plan.max_lag,
        "simulations": plan.simulations,
        "constants": _constants(constants),
    }


def without_infinities(value: Any) -> Any:  # noqa: ANN401  (JSON)
    """Return the value with null in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: without_infinities(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinities(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _head(row: SweepRow, constants: Sequence[AssumedConstant]) -> dict[str, Any]:
    return {"workload": _workload_json(row.workload, len(row.runs)), "constants": _constants(constants)}


def _trial(trial: Trial) -> dict[str, Any]:
    return {"fields": trial.choice.as_dict(), "result": trial.result.as_dict()}


def _workload_json(workload: Workload, seeds: int) -> dict[str, Any]:
    """Return the bounds of staleness and the sizes of a workload."""
    window, lane = workload.settings.window, workload.lane
    return {
        "policy": str(workload.policy),
        "onMissedDeadline": str(workload.on_missed_deadline),
        "stalenessThreshold": window.staleness_threshold,
        "maxVersionLag": window.max_version_lag if workload.policy is BatchPolicy.DEADLINE_FIRST else None,
        "promptsPerBatch": workload.prompts_per_batch,
        "groupSize": workload.group_size,
        "batchesPerVersion": workload.batches_per_version,
        "replicas": len(workload.replicas),
        "slots": sum(replica.slots for replica in workload.replicas),
        "trainerUnits": workload.train_pool.units,
        "lane": lane and {"replicas": lane.replicas, "speed": lane.speed, "afterTokens": lane.after_tokens},
        "lengths": describe_lengths(workload),
        "batches": workload.batches,
        "warmUp": workload.warm_up,
        "seed": workload.seed,
        "seeds": seeds,
    }


def _constants(constants: Sequence[AssumedConstant]) -> list[dict[str, Any]]:
    return [{"name": item.name, "value": item.value, "assumed": not item.is_given} for item in constants]
