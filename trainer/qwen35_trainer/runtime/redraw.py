"""`qwen35 report RUN`: draws the report of a run's folder again, after the run or while it continues."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.progress.html_report import write_report
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.summary import Summary, summary_of
from qwen35_trainer.runtime.folder import RunFolder


class NotDrawn(Exception):
    """The report was not drawn. The message contains the reason."""


@dataclass(frozen=True)
class Drawn:
    """A report, and the numbers in it."""

    path: Path
    summary: Summary


def is_run(folder: Path) -> bool:
    return RunFolder(folder).manifest.is_file()


def redraw(root: Path, output: Path | None) -> Drawn:
    """Write the report of the run in `root` to `output`, by default into `root`. Raises NotDrawn and ManifestError."""
    folder = RunFolder(root)
    if not is_run(root):
        missing = "has no run.yaml" if root.is_dir() else "does not exist"
        raise NotDrawn(f"{root} is not the folder of a run: it {missing}. Name one, or a training of the cluster")
    spec = load_manifest(folder.manifest).spec
    bound = None if spec.mode == "SFT" else spec.effective_async.maxVersionLag
    try:
        run = RunFold.of(read_records(folder.metrics))
        summary = summary_of(run.totals, max_version_lag=bound, peak_rss_mib=_peak_rss_mib(folder))
        return Drawn(write_report(root, run, folder.manifest.read_text(), summary, output), summary)
    except (OSError, ValueError) as error:
        raise NotDrawn(str(error)) from error
    except ImportError as error:
        raise NotDrawn(f"a report needs {error.name}. Install it: pip install 'qwen35[trainer]'") from error


def _peak_rss_mib(folder: RunFolder) -> float | None:
    """Return the peak memory that the run measured, which its records do not contain; None when it is unknown."""
    try:
        measured = json.loads(folder.summary.read_text())["peakRssMiB"]
    except (OSError, ValueError, KeyError):
        return None  # the run continues, or was killed
    return float(measured) if measured is not None else None
