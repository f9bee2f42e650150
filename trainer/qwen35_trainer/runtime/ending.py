"""The last lines that `qwen35 run` prints."""

from __future__ import annotations

from rich.console import Console

from qwen35_trainer import formatting
from qwen35_trainer.progress import held_out
from qwen35_trainer.progress.summary import Summary
from qwen35_trainer.runtime.run_command import FinishedRun

NOTHING_SAVED = "ended by a signal before the first update; there was nothing to save"


def print_end(console: Console, finished: FinishedRun, how_to_resume: str) -> None:
    """Print the main results and the paths of the outputs. how_to_resume: the command that continues the run."""
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
    """Return the results of a run that exist, each as name and formatted value."""
    rows = [
        (f"held-out {each.name}", f"{each.values} {each.unit}".rstrip()) for each in held_out.summary_measures(summary)
    ]
    for part, values in (("reward", summary["heldOutScores"]), ("source", summary["heldOutRewardBySource"])):
        if len(values) > 1:  # the mean of a single value is in the rows above
            rows.append((f"held-out by {part}", formatting.by_name(values)))
    if summary["maxTokenLag"] is not None:
        lag = formatting.counted(summary["maxTokenLag"], "version")
        rows.append(("maximum token lag", f"{lag} (bound {summary['maxVersionLag']})"))
    if summary["rolloutIdle"] is not None and summary["trainIdle"] is not None:
        rollout, trainer = formatting.percent(summary["rolloutIdle"]), formatting.percent(summary["trainIdle"])
        rows.append(("idle", f"rollout {rollout}, trainer {trainer}"))
    if summary["tokensPerSecond"] is not None:
        rows.append(("generated", f"{summary['tokensPerSecond']:.0f} tokens/s"))
    if summary["rewardErrors"]:
        rows.append(("reward errors", formatting.failures(summary["errorsByReward"], summary["timeoutsByReward"])))
    if summary["firstRewardError"]:
        rows.append(("first of them", " ".join(summary["firstRewardError"].split())))
    return rows
