"""What a finished run says last."""

from __future__ import annotations

from rich.console import Console

from qwen35_trainer.progress import formatting, held_out
from qwen35_trainer.progress.summary import Summary
from qwen35_trainer.runtime.run import Finished

NOTHING_SAVED = "ended by a signal before the first update; there was nothing to save"


def print_end(console: Console, finished: Finished, how_to_resume: str) -> None:
    """The numbers that matter, and where the rest lies. how_to_resume: the command that continues the run."""
    summary, folder = finished.summary, finished.folder
    rows = summary_rows(summary)
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"\n{finished.finish.outcome}: {summary['updates']} updates in {summary['seconds']:.0f} s"]
    lines += [f"{name:<{width}}  {value}" for name, value in rows]
    if finished.finish.outcome == "Stopped" and not finished.saved_nothing:
        lines += [f"Saved to {summary['checkpoint']}; continue with:", f"  {how_to_resume}"]
    if summary["exportProblem"]:
        lines.append(f"Not exported: {summary['exportProblem']}")
        lines.append(f"Try again with: qwen35 export {summary['checkpoint']} --output DIR")
    elif summary["export"]:
        lines.append(f"Model:  {summary['export']}")
    lines.append(f"Report: {folder.root / 'report.html'}")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Name and value of each number that the run has."""
    rows = [(f"held-out {each.name}", f"{each.course} {each.unit}".rstrip()) for each in held_out.of_summary(summary)]
    for part, values in (("reward", summary["heldOutScores"]), ("source", summary["heldOutRewardBySource"])):
        if len(values) > 1:  # the mean of a single one is already there
            rows.append((f"held-out by {part}", formatting.by_name(values)))
    if summary["maxTokenLag"] is not None:
        lag = formatting.counted(summary["maxTokenLag"], "version")
        rows.append(("greatest token lag", f"{lag} (bound {summary['maxVersionLag']})"))
    if summary["rolloutIdle"] is not None and summary["trainerIdle"] is not None:
        rollout, trainer = formatting.percent(summary["rolloutIdle"]), formatting.percent(summary["trainerIdle"])
        rows.append(("idle", f"rollout {rollout}, trainer {trainer}"))
    if summary["tokensPerSecond"] is not None:
        rows.append(("generated", f"{summary['tokensPerSecond']:.0f} tokens/s"))
    if summary["rewardErrors"]:
        rows.append(("reward errors", formatting.failures(summary["errorsByReward"], summary["timeoutsByReward"])))
    if summary["firstRewardError"]:
        rows.append(("first of them", " ".join(summary["firstRewardError"].split())))
    return rows
