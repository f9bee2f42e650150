"""Formats a resource plan as text for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qwen35_trainer.formatting import count, counted, duration, number, percent
from qwen35_trainer.planning.memory_plan import GIB
from qwen35_trainer.planning.resource_plan import ResourcePlan
from qwen35_trainer.planning.train_memory import TrainMemory
from qwen35_trainer.planning.update_time import UpdateTime


def resource_table(plan: ResourcePlan) -> RenderableType:
    """Return the tables that `qwen35 plan` prints.

    They show the memory of a train rank, of a replica and of pods, the times, and what does not fit.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("memory of a device")
    table.add_column("GiB", justify="right")
    for name, size in _train_rows(plan.memory.train.device):
        table.add_row(f"train: {name}", _gib(size))
    table.add_row(
        f"train: at its peak, {plan.memory.train.peak}",
        _gib(plan.memory.train.device.total),
        style="bold",
        end_section=True,
    )
    if (replica := plan.memory.replica) is not None:
        table.add_row("replica: weights", _gib(replica.weights))
        table.add_row("replica: workspace of a step", _gib(replica.workspace))
        table.add_row(f"replica: keys, values and states of {counted(_held(plan), 'sequence')}", _gib(replica.cache))
        table.add_row("replica: together", _gib(replica.total), style="bold", end_section=True)
    if plan.memory.device is not None:
        table.add_row(f"{plan.memory.device} has", _gib(plan.memory.device_memory))
    return Group(
        Text(
            f"{plan.parameters / 1e9:,.2f} billion parameters, of which a token uses {plan.active / 1e9:,.2f}",
            style="dim",
        ),
        table,
        _pods(plan),
        *([] if plan.time is None else [_times(plan, plan.time)]),
        *(Text(note) for note in plan.notes),
        *_misfits(plan),
    )


def _train_rows(memory: TrainMemory) -> Iterator[tuple[str, float]]:
    for field in fields(memory):
        if size := getattr(memory, field.name):
            yield field.name, size


def _held(plan: ResourcePlan) -> int:
    assert plan.memory.replica is not None
    return plan.memory.replica.slots if plan.memory.replica.reserves else plan.memory.replica.fitting


def _pods(plan: ResourcePlan) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("memory of a pod, GiB")
    for head in ("processes", "tensors", "versions", "shared", "together", "requested"):
        table.add_column(head, justify="right")
    for pod in plan.memory.pods:
        sizes = (pod.processes, pod.tensors, pod.staging, pod.shared, pod.total)
        table.add_row(pod.pool, *map(_gib, sizes), count(plan.requests[pod.pool].memory_gib))
    return table


def _times(plan: ResourcePlan, time: UpdateTime) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("time" + (" (measured)" if plan.measured else ""))
    table.add_column("seconds", justify="right")
    table.add_column("")
    note = "" if plan.measured else f"{time.training.passes:g} forward passes, bubble {percent(time.training.bubble)}"
    table.add_row("training of an update", number(time.training.seconds), note)
    if (generation := time.generation) is not None:
        note = f"responses of {plan.mean:,.0f} tokens in the mean"
        if not plan.measured:
            note = f"{note}; step {generation.step * 1e3:.1f} ms of {generation.sequences:,.0f} sequences"
        table.add_row("generation for an update", number(generation.seconds), note)
    if (publication := time.publication) is not None:
        table.add_row("publication: the trainer copies", number(publication.copy), "")
        table.add_row("publication: to the replicas", number(publication.transfer), "they generate meanwhile")
        table.add_row("publication: to their devices", number(publication.load), "")
    table.add_row(
        "an update", number(time.seconds), f"{duration(time.seconds)}; bottleneck: {time.bottleneck}", style="bold"
    )
    return table


def _misfits(plan: ResourcePlan) -> list[RenderableType]:
    if not plan.misfits:
        return [Text("Everything fits.")]
    return [Text("\n".join(["Does not fit:", *map(str, plan.misfits)]))]


def resource_json(plan: ResourcePlan) -> dict[str, Any]:
    """Return the data that `qwen35 plan --json` prints under the key `resources`.

    Memory is in bytes and time in seconds, unless a key ends in GiB. None stands for a number that is not known.
    """
    memory, replica = plan.memory, plan.memory.replica
    return {
        "device": memory.device,
        "deviceMemory": _finite(memory.device_memory),
        "parameters": plan.parameters,
        "activeParameters": plan.active,
        "train": {
            "peak": memory.train.peak,
            "parts": {field.name: getattr(memory.train.device, field.name) for field in fields(memory.train.device)},
            "total": memory.train.device.total,
            "betweenUpdates": memory.train.state,
            "host": memory.train.host,
        },
        "replica": None
        if replica is None
        else {
            "weights": replica.weights,
            "workspace": replica.workspace,
            "perSequence": replica.per_sequence,
            "slots": replica.slots,
            "fittingSequences": replica.fitting if math.isfinite(replica.available) else None,
            "cache": replica.cache,
            "total": replica.total,
        },
        "pods": {
            pod.pool: {
                "processes": pod.processes,
                "tensors": pod.tensors,
                "versions": pod.staging,
                "sharedMemory": pod.shared,
                "total": pod.total,
                "requestedGiB": plan.requests[pod.pool].memory_gib,
                "requestedSharedMemoryGiB": plan.requests[pod.pool].shm_gib,
            }
            for pod in memory.pods
        },
        "time": None if plan.time is None else _time_json(plan, plan.time),
        "notes": list(plan.notes),
        "misfits": [{"path": each.path, "message": each.message, "fix": each.fix} for each in plan.misfits],
    }


def _time_json(plan: ResourcePlan, time: UpdateTime) -> dict[str, Any]:
    publication = time.publication
    return {
        "measured": plan.measured,
        "meanResponseTokens": plan.mean,
        "update": time.seconds,
        "bottleneck": time.bottleneck,
        "training": time.training.seconds,
        "pipelineBubble": time.training.bubble,
        "generation": None if time.generation is None else time.generation.seconds,
        "publication": None
        if publication is None
        else {"copy": publication.copy, "transfer": publication.transfer, "load": publication.load},
    }


def _large(value: int) -> str:
    return f"{value / 1e9:,.2f} billion" if value >= 1e9 else count(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"
