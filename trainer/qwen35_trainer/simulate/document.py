"""What `--json` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qwen35_trainer.simulate.load import Load, Policy
from qwen35_trainer.simulate.manifest import Constant, lengths_in_words
from qwen35_trainer.simulate.plan import Plan
from qwen35_trainer.simulate.sweep import Axis, LeftOut, Row
from qwen35_trainer.simulate.trials import Trial


def run_document(row: Row, constants: Sequence[Constant]) -> dict[str, Any]:
    """One load."""
    return _head(row, constants) | {"result": row.result.as_dict()}


def sweep_document(
    axes: Sequence[Axis], rows: Sequence[Row], left_out: Sequence[LeftOut], constants: Sequence[Constant]
) -> dict[str, Any]:
    """One row for each combination; `load` is that of the first."""
    keys = [axis.key for axis in axes]
    return _head(rows[0], constants) | {
        "rows": [{"values": dict(zip(keys, row.values, strict=True)), "result": row.result.as_dict()} for row in rows],
        "leftOut": [
            {"values": dict(zip(keys, each.values, strict=True)), "problems": each.problems} for each in left_out
        ],
    }


def plan_document(made: Plan, constants: Sequence[Constant]) -> dict[str, Any]:
    """The plan, the manifest as it is, and every neighbour."""
    best = made.recommended.result.effective_throughput
    neighbours = [
        {
            "change": each.change,
            "withinBound": each.within,
            "throughputChange": each.trial.result.effective_throughput / best - 1,
        }
        | _trial(each.trial)
        for each in made.neighbours
    ]
    return {
        "set": made.changes,
        "plan": _trial(made.recommended),
        "manifest": _trial(made.manifest),
        "neighbours": neighbours,
        "arithmetic": {"ideal": made.estimate.ideal, "leastStaleness": made.estimate.least_staleness},
        "maxLag": made.max_lag,
        "simulations": made.simulations,
        "constants": _constants(constants),
    }


def plain(value: Any) -> Any:  # noqa: ANN401  (JSON)
    """The value with null for numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: plain(inside) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inside) for inside in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _head(row: Row, constants: Sequence[Constant]) -> dict[str, Any]:
    return {"load": _load(row.load, len(row.runs)), "constants": _constants(constants)}


def _trial(trial: Trial) -> dict[str, Any]:
    return {"fields": trial.choice.as_dict(), "result": trial.result.as_dict()}


def _load(load: Load, seeds: int) -> dict[str, Any]:
    """Knobs and sizes."""
    window, lane = load.settings.window, load.lane
    return {
        "policy": str(load.policy),
        "onMissedDeadline": str(load.on_missed_deadline),
        "stalenessThreshold": window.staleness_threshold,
        "maxVersionLag": window.max_version_lag if load.policy is Policy.DEADLINE_FIRST else None,
        "promptsPerBatch": load.prompts_per_batch,
        "groupSize": load.group_size,
        "batchesPerVersion": load.batches_per_version,
        "engines": len(load.engines),
        "slots": sum(engine.slots for engine in load.engines),
        "trainerUnits": load.train_pool.units,
        "lane": lane and {"engines": lane.engines, "speed": lane.speed, "afterTokens": lane.after_tokens},
        "lengths": lengths_in_words(load),
        "batches": load.batches,
        "warmUp": load.warm_up,
        "seed": load.seed,
        "seeds": seeds,
    }


def _constants(constants: Sequence[Constant]) -> list[dict[str, Any]]:
    return [{"name": each.name, "value": each.value, "guess": not each.given} for each in constants]
