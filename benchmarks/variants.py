"""The three variants of a job, and their measurements: the same numbers from our records and from the peer's trace.

The steady window leaves out the first updates (`Part.skipped`) and the last three: at its end an asynchronous run has
nothing left to generate, and would look faster than it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from jobs import DATA, GOAL, PROMPTS, SAMPLES, Mode, Part, write_manifest
from peers.trl_grpo import Settings
from watch import Seen, run

from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import EvaluationRecord, UpdateRecord

type Variant = Literal["async", "sync", "trl"]

VARIANTS: tuple[Variant, ...] = ("async", "sync", "trl")
MODES: dict[Variant, Mode] = {"async": "FullyAsync", "sync": "Colocated"}
LAST = 3
"""Updates at the end that do not count."""
PEER = Path(__file__).parent / "peers" / "trl_grpo.py"


@dataclass(frozen=True)
class Update:
    """One update of any variant. `time` is since the process began; idle shares are of the time since the last update."""

    time: float
    trained: int
    """Response tokens in the loss."""
    generated: float
    """Tokens generated since the last update."""
    rollout_idle: float
    train_idle: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of a variant. docs/benchmarks.md explains each number."""

    samples_per_second: float
    generated_tokens_per_second: float
    trained_tokens_per_second: float
    seconds_per_update: float
    first_update_seconds: float
    goal_seconds: float | None
    final_accuracy: float | None
    response_tokens_mean: float
    rollout_idle: float
    train_idle: float
    peak_rss_mib: float
    peak_pss_mib: float
    others_cores: float
    cores_busy_before: float


def measure(variant: Variant, part: Part, folder: Path) -> Measured:
    """One run, from process start to process end. `folder` holds the model in `model`; the run's files go there too."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    # Ray starts its workers at a lower priority: on a shared machine other processes would slow only our runs.
    environment["RAY_worker_niceness"] = "0"
    updates, accuracies, seen = (_trl if variant == "trl" else _ours)(variant, part, folder, environment)
    return _summary(part, updates, accuracies, seen)


type _Run = tuple[Sequence[Update], Sequence[tuple[float, float]], Seen]
"""Updates; (time, held-out accuracy) of the evaluations; what the processes used."""


def _ours(variant: Variant, part: Part, folder: Path, environment: dict[str, str]) -> _Run:
    manifest = write_manifest(part, MODES[variant], folder)
    output = folder / "output"
    command = [sys.executable, "-m", "qwen35_trainer.cli", "run", str(manifest), "--output", str(output)]
    seen = run(command, environment=environment, log=folder / "log")
    records = read_records(output / "metrics.jsonl")
    updates = [
        Update(
            time=record.time,
            trained=record.tokens,
            generated=(record.tokens_per_second or 0.0) * record.seconds,
            rollout_idle=record.rollout_idle or 0.0,
            train_idle=record.train_idle or 0.0,
        )
        for record in records
        if isinstance(record, UpdateRecord)
    ]
    return updates, [(r.time, r.accuracy or 0.0) for r in records if isinstance(r, EvaluationRecord)], seen


def _trl(variant: Variant, part: Part, folder: Path, environment: dict[str, str]) -> _Run:
    trace = folder / "trace.jsonl"
    settings = Settings(
        model=str(folder.parent / "model"),
        train=str(DATA / "train.jsonl"),
        validation=str(DATA / "validation.jsonl"),
        trace=str(trace),
        updates=part.updates,
        prompts=PROMPTS,
        samples=SAMPLES,
        response_tokens=part.response_tokens,
        learning_rate=part.learning_rate,
        schedule=part.schedule.lower(),
        extract=part.extract,
        evaluate_every=part.evaluate_every,
        micro_batch=part.trl_micro_batch,
        threads=part.trl_threads,
    )
    path = folder / f"{variant}.json"
    path.write_text(json.dumps(asdict(settings)))
    seen = run([sys.executable, str(PEER), str(path)], environment=environment, log=folder / "log")
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    updates = [
        Update(
            time=row["time"],
            trained=row["tokens"],
            generated=row["tokens"],
            rollout_idle=1 - row["generating"] / row["seconds"],
            train_idle=row["generating"] / row["seconds"],
        )
        for row in rows
        if "seconds" in row
    ]
    return updates, [(row["time"], row["accuracy"]) for row in rows if "accuracy" in row], seen


def _summary(part: Part, updates: Sequence[Update], accuracies: Sequence[tuple[float, float]], seen: Seen) -> Measured:
    first, window = updates[part.skipped - 1], updates[part.skipped : -LAST]
    seconds = window[-1].time - first.time
    lengths = [after.time - before.time for before, after in zip((first, *window[:-1]), window, strict=True)]

    def share(value: Callable[[Update], float]) -> float:
        return sum(value(update) * length for update, length in zip(window, lengths, strict=True)) / seconds

    samples = PROMPTS * SAMPLES
    return Measured(
        samples_per_second=samples * len(window) / seconds,
        generated_tokens_per_second=sum(update.generated for update in window) / seconds,
        trained_tokens_per_second=sum(update.trained for update in window) / seconds,
        seconds_per_update=seconds / len(window),
        first_update_seconds=updates[0].time,
        goal_seconds=next((time for time, accuracy in accuracies if accuracy >= GOAL), None),
        final_accuracy=accuracies[-1][1] if accuracies else None,
        response_tokens_mean=fmean(update.trained for update in window) / samples,
        rollout_idle=share(lambda update: update.rollout_idle),
        train_idle=share(lambda update: update.train_idle),
        peak_rss_mib=seen.peak_rss_mib,
        peak_pss_mib=seen.peak_pss_mib,
        others_cores=seen.others_cores,
        cores_busy_before=seen.busy_before,
    )
