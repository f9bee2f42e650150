"""Reads the folder of a run for a comparison.

Memory is bounded, whatever the number of records. Records of earlier releases can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen35_trainer.comparison.run_events import RunEvents
from qwen35_trainer.manifest import ManifestError, load_manifest
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.progress.metrics_file import read_records
from qwen35_trainer.progress.records import EvaluationRecord, RunRecord, UpdateRecord
from qwen35_trainer.progress.repeats import marked
from qwen35_trainer.progress.run_fold import MAX_POINTS, RunFold
from qwen35_trainer.progress.summary import Summary, summary_of
from qwen35_trainer.progress.thinned import Thinned
from qwen35_trainer.runtime.folder import RunFolder
from qwen35_trainer.runtime.results import peak_rss_mib, why_no_run


class RunUnreadable(Exception):
    """Raised for a folder that is not a run, or whose manifest or records cannot be read.

    The message gives the reason and a fix.
    """


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: its manifest, and the data of its records."""

    name: str
    """Name of the run, unique in the comparison."""
    folder: RunFolder
    spec: TrainingSpec
    fold: RunFold
    events: RunEvents
    summary: Summary

    @property
    def updates(self) -> list[UpdateRecord]:
        """The update records that led to the final weights; updates that a later attempt repeated are left out.

        If there are more than MAX_POINTS updates, only the first, every n-th and the last remain, where n is a power of 2.
        """
        return self.fold.updates.values

    @property
    def evaluations(self) -> list[EvaluationRecord]:
        """The evaluation records that led to the final weights; evaluations that a later attempt repeated are left out.

        If there are more than MAX_POINTS evaluations, only the first, every n-th and the last remain, where n is a power of 2.
        """
        return self.fold.evaluations.values

    def within(self, update: int, seconds: float) -> tuple[list[UpdateRecord], list[EvaluationRecord]]:
        """Return the update and evaluation records whose update number is at most `update` or whose time is at most `seconds`.

        seconds: time since the training first started. If the records in memory have been thinned, only a few
        of them may be in this range, so the file is read again. If more than MAX_POINTS records of a class are in the
        range, only the first, every n-th and the last are returned, where n is a power of 2.
        """
        updates, evaluations = Thinned[UpdateRecord](MAX_POINTS), Thinned[EvaluationRecord](MAX_POINTS)
        if self.fold.updates.stride == self.fold.evaluations.stride == 1:
            counted: Iterable[RunRecord] = (*self.updates, *self.evaluations)
        else:
            counted = (record for record, repeated in marked(read_records(self.folder.metrics)) if not repeated)
        for record in counted:
            match record:
                case UpdateRecord() if record.update <= update or record.time <= seconds:
                    updates.add(record)
                case EvaluationRecord() if record.update <= update or record.time <= seconds:
                    evaluations.add(record)
        return updates.values, evaluations.values


def read_run(root: Path, name: str) -> ComparedRun:
    """Read the manifest and the records of the run in the folder `root`.

    name: name of the run in the comparison. Raises RunUnreadable if the folder is not a run, or a file cannot be read.
    """
    if (problem := why_no_run(root)) is not None:
        raise RunUnreadable(f"{problem}. Name the folder of a run")
    folder = RunFolder(root)
    fold, events = RunFold(), RunEvents()
    try:
        spec = load_manifest(folder.manifest, new=False).spec
        for record, repeated in marked(read_records(folder.metrics)):
            fold.add(record, repeated=repeated)
            events.add(record, repeated=repeated)
    except (ManifestError, OSError, ValueError) as error:
        raise RunUnreadable(str(error)) from error
    bound = None if spec.mode == "SFT" else spec.effective_async.maxVersionLag
    summary = summary_of(fold.totals, max_version_lag=bound, peak_rss_mib=peak_rss_mib(folder))
    return ComparedRun(name, folder, spec, fold, events, summary)


def names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: the last part of its path.

    If several folders have the same last part, their names are their paths as given.
    """
    last = [folder.resolve().name for folder in folders]
    return [name if last.count(name) == 1 else str(folder) for name, folder in zip(last, folders, strict=True)]
