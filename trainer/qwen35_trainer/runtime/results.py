"""Shows the results of a run to people.

qwen35 run      print_end: the last lines that the command prints
qwen35 report   redraw: the report of the run's folder again, after the run or while it continues
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from qwen35_trainer import formatting
from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress import held_out
from qwen35_trainer.progress.html_report import write_report
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.summary import Summary, summary_of
from qwen35_trainer.runtime.folder import RunFolder

if TYPE_CHECKING:
    from qwen35_trainer.runtime.run_command import FinishedRun  # imports Ray, which a report does not need

NOTHING_SAVED = "ended by a signal before the first update; there was nothing to save"


def print_end(console: Console, finished: FinishedRun, how_to_resume: str) -> None:
    """Print the main results of a run and the paths of its outputs.

    how_to_resume: the command that continues the run.
    """
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


def failure_text(finished: FinishedRun, how_to_resume: str) -> str:
    """Return the message of a failed run, with the path of its logs.

    how_to_resume: the command that continues the run. The message contains this command if the run has a checkpoint and
    another start can succeed.
    """
    finish, lines = finished.finish, [finished.finish.message]
    may_succeed = any(reason.retryable for reason in FailureReason if reason == finish.reason)
    if may_succeed and finished.summary["checkpoint"] and "--resume" not in finish.message:
        lines.append(f"Continue with: {how_to_resume}")
    return "\n".join([*lines, f"Logs: {finished.folder.logs}"])


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the results of a run as (name, formatted value). Results that the run does not have are left out."""
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
        rows.append(("first of them", formatting.excerpt(summary["firstRewardError"])))
    return rows


class NotDrawn(Exception):
    """The report could not be written. The message contains the reason."""


@dataclass(frozen=True)
class Drawn:
    """A report that was written: its path, and the summary that it shows."""

    path: Path
    summary: Summary


def is_run(folder: Path) -> bool:
    return RunFolder(folder).manifest.is_file()


def why_no_run(folder: Path) -> str | None:
    """Return the reason, as text, why `folder` is not the output folder of a run; None if it is one."""
    if is_run(folder):
        return None
    return f"{folder} is not the folder of a run: it {'has no run.yaml' if folder.is_dir() else 'does not exist'}"


def redraw(root: Path, output: Path | None) -> Drawn:
    """Write the report of a run, and return its path and its summary.

    root: output folder of the run. output: path of the report; None: report.html in `root`. Raises ManifestError if
    run.yaml is invalid. Raises NotDrawn if `root` is not the folder of a run, if its records cannot be read, if the
    report cannot be written, or if a package is missing.
    """
    folder = RunFolder(root)
    if (problem := why_no_run(root)) is not None:
        raise NotDrawn(f"{problem}. Name one, or a training of the cluster")
    spec = load_manifest(folder.manifest, new=False).spec
    bound = None if spec.mode == "SFT" else spec.effective_async.maxVersionLag
    try:
        run = RunFold.of(read_records(folder.metrics))
        summary = summary_of(run.totals, max_version_lag=bound, peak_rss_mib=peak_rss_mib(folder))
        return Drawn(write_report(root, run, folder.manifest.read_text(), summary, output), summary)
    except (OSError, ValueError) as error:
        raise NotDrawn(str(error)) from error
    except ImportError as error:
        raise NotDrawn(f"a report needs {error.name}. Install it: pip install 'qwen35[trainer]'") from error


def peak_rss_mib(folder: RunFolder) -> float | None:
    """Return the peak memory of a run in MiB, from summary.json, because the records do not contain it.

    None: the folder has no summary, because the run continues or was killed, or the peak was not measured.
    """
    try:
        measured = json.loads(folder.summary.read_text())["peakRssMiB"]
    except (OSError, ValueError, KeyError):
        return None  # the run continues, or was killed
    return float(measured) if measured is not None else None
