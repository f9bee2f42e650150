"""The figures of whole runs in a comparison.

They cover progress, the time of an update by its parts, speed, staleness, publications, memory and failures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from qwen35_trainer.comparison.compared_run import ComparedRun
from qwen35_trainer.comparison.row import ComparedRow, RowSection, RunValue, whole, with_values
from qwen35_trainer.formatting import count, duration, number, percent
from qwen35_trainer.progress.records import TIME_PARTS

_MIN_REMAINDER: Final = 0.01
"""Share of an update's time above which the time that belongs to no recorded part is shown.
Earlier releases recorded fewer parts."""


def figure_sections(runs: Sequence[ComparedRun]) -> list[RowSection]:
    """Return the sections with figures of whole runs.

    Rows in which no run has a value other than 0 are left out, and so are sections without rows.
    """
    sections = [
        RowSection("progress", "Progress", with_values(_progress(runs))),
        RowSection("updateTime", "Time of an update", with_values(_update_time(runs))),
        RowSection("speed", "Speed", with_values(_speed(runs))),
        RowSection("staleness", "Staleness", with_values(_staleness(runs))),
        RowSection("publication", "Publication of weights", with_values(_publication(runs))),
        RowSection("failures", "Memory and failures", with_values(_failures(runs))),
    ]
    return [section for section in sections if section.rows]


def update_seconds(run: ComparedRun) -> dict[str, float]:
    """Return the mean seconds of each part of an update: name of the part → seconds.

    The result is empty if the run has no update.

    The part "not divided" is time that belongs to no recorded part. It is left out if it is at most 1 % of the update.
    """
    totals = run.fold.totals
    if not totals.updates:
        return {}
    parts = {part: totals.time_parts[part] / totals.updates for part in TIME_PARTS}
    whole = totals.update_seconds / totals.updates
    remainder = whole - sum(parts.values())
    return parts | ({"not divided": remainder} if remainder > _MIN_REMAINDER * whole else {})


def _of(runs: Sequence[ComparedRun], value: Callable[[ComparedRun], RunValue]) -> tuple[RunValue, ...]:
    return tuple(value(run) for run in runs)


def _progress(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    return [
        ComparedRow("outcome", _of(runs, lambda run: run.summary["outcome"] or "not finished")),
        ComparedRow("updates", _of(runs, _updates)),
        ComparedRow("time", _of(runs, lambda run: run.summary["seconds"]), duration, ratios=True),
        ComparedRow(
            "first update after", _of(runs, lambda run: run.summary["timeToFirstUpdateSeconds"]), duration, ratios=True
        ),
        ComparedRow("trained samples", _of(runs, lambda run: run.summary["samplesTrained"]), whole, ratios=True),
        ComparedRow("trained tokens", _of(runs, lambda run: run.summary["tokensTrained"]), whole, ratios=True),
    ]


def _updates(run: ComparedRun) -> str:
    total = run.summary["updatesTotal"]
    return f"{count(run.summary['updates'])}{f' of {count(total)}' if total else ''}"


def _update_time(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    parts = [update_seconds(run) for run in runs]
    names = [name for name in (*TIME_PARTS, "not divided") if any(each.get(name) for each in parts)]
    whole = ComparedRow("together", tuple(sum(each.values()) or None for each in parts), duration, ratios=True)
    return [ComparedRow(name, tuple(each.get(name) for each in parts), _seconds, ratios=True) for name in names] + [
        whole
    ]


def _speed(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    return [
        ComparedRow("generated tokens/s", _of(runs, lambda run: run.summary["tokensPerSecond"]), ratios=True),
        ComparedRow("of each rollout device", _of(runs, _of_rollout_device), ratios=True),
        ComparedRow("trained tokens/s", _of(runs, lambda run: run.summary["trainedTokensPerSecond"]), ratios=True),
        ComparedRow("of each train device", _of(runs, _of_train_device), ratios=True),
        ComparedRow("trained samples/s", _of(runs, lambda run: run.summary["samplesPerSecond"]), ratios=True),
        ComparedRow("tokens of a sample", _of(runs, _tokens_of_sample), ratios=True),
        ComparedRow("idle, rollout", _of(runs, lambda run: run.summary["rolloutIdle"]), percent),
        ComparedRow("idle, train", _of(runs, lambda run: run.summary["trainIdle"]), percent),
    ]


def _of_rollout_device(run: ComparedRun) -> float | None:
    rate, devices = run.summary["tokensPerSecond"], run.spec.rollout_devices
    return None if rate is None or not devices else rate / devices


def _of_train_device(run: ComparedRun) -> float | None:
    rate = run.summary["trainedTokensPerSecond"]
    return None if rate is None else rate / run.spec.world_size


def _tokens_of_sample(run: ComparedRun) -> float | None:
    totals = run.fold.totals
    return (totals.tokens + totals.masked_tokens) / totals.samples if totals.samples else None


def _staleness(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    return [
        ComparedRow("mean lag of tokens, in versions", _of(runs, lambda run: run.summary["meanTokenLag"])),
        ComparedRow("maximum lag of tokens", _of(runs, lambda run: run.summary["maxTokenLag"]), whole),
        ComparedRow("bound of the lag", _of(runs, lambda run: run.summary["maxVersionLag"]), whole),
        ComparedRow("tokens above the bound, masked", _of(runs, lambda run: run.summary["maskedTokens"]), whole),
        ComparedRow(
            "groups that left untrained", _of(runs, lambda run: sum(run.summary["groupsLeft"].values())), whole
        ),
    ]


def _publication(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    def mean(run: ComparedRun) -> float | None:
        return run.events.publishing / run.events.publications if run.events.publications else None

    def pause(run: ComparedRun) -> float | None:
        return run.events.paused / run.events.pauses if run.events.pauses else None

    return [
        ComparedRow("until all replicas have a version", _of(runs, mean), _seconds, ratios=True),
        ComparedRow("the longest", _of(runs, lambda run: run.events.longest or None), _seconds, ratios=True),
        ComparedRow("pause of training", _of(runs, pause), _seconds, ratios=True),
    ]


def _failures(runs: Sequence[ComparedRun]) -> list[ComparedRow]:
    return [
        ComparedRow("peak memory of its processes, MiB", _of(runs, lambda run: run.summary["peakRssMiB"]), ratios=True),
        ComparedRow("restarts", _of(runs, lambda run: max(0, run.events.starts - 1)), whole),
        ComparedRow("failed attempts", _of(runs, lambda run: run.events.failures), whole),
        ComparedRow("updates trained again", _of(runs, lambda run: run.events.repeated), whole),
        ComparedRow("replicas lost", _of(runs, lambda run: run.events.replicas_lost), whole),
        ComparedRow("failed groups", _of(runs, lambda run: run.summary["groupsLeft"].get("failed", 0)), whole),
        ComparedRow("failed reward calls", _of(runs, lambda run: run.summary["rewardErrors"]), whole),
    ]


def _seconds(value: float | None) -> str:
    """Format a duration, with milliseconds below a second."""
    return f"{number(value * 1000)} ms" if value is not None and 0 < value < 1 else duration(value)
