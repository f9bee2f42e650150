"""Compares runs: the settings that differ, how the runs learn, and figures of whole runs.

Values are means and totals of the records. No confidence interval and no statistical significance is computed; run
several seeds to see the noise. Apart from reading the folders of the runs, the functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from qwen35_trainer.comparison.compared_run import ComparedRun, RunUnreadable, names, read_run
from qwen35_trainer.comparison.figures import figure_sections
from qwen35_trainer.comparison.learning import learning_sections, reach
from qwen35_trainer.comparison.row import ComparedRow, RowSection
from qwen35_trainer.comparison.settings import differing_settings
from qwen35_trainer.formatting import count

MAX_RUNS: Final = 8
"""Maximum number of runs. The charts have this many colours that can be distinguished."""


class ComparisonRefused(Exception):
    """Raised if runs cannot be compared. The message has one line for each problem."""


@dataclass(frozen=True)
class Comparison:
    """The result of comparing runs. Each row has one value per run, in the order of `runs`."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[ComparedRow, ...]
    sections: tuple[RowSection, ...]
    notes: tuple[str, ...]
    """Sentences about what the comparison leaves out, and why."""


def compare(folders: Sequence[Path]) -> Comparison:
    """Compare the runs in `folders`.

    Raises ComparisonRefused, with every problem, if there are fewer than two or more than MAX_RUNS folders, a folder is
    named twice, or a folder cannot be read as a run.
    """
    problems, runs = list(_problems(folders)), list[ComparedRun]()
    if len(folders) <= MAX_RUNS:
        for folder, name in zip(folders, names(folders), strict=True):
            try:
                runs.append(read_run(folder, name))
            except RunUnreadable as error:
                problems.append(str(error))
    if problems:
        raise ComparisonRefused("\n".join(dict.fromkeys(problems)))
    return Comparison(
        tuple(runs),
        differing_settings([run.spec for run in runs]),
        (*learning_sections(runs), *figure_sections(runs)),
        tuple(_notes(runs)),
    )


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the data that `qwen35 compare --json` prints.

    Each list under `settings` and `figures` has one value per run, in the order of `runs`. A value that a run does
    not have is None in `figures`, and the text "not set" in `settings`. `notes` is a list of sentences.
    """
    return {
        "runs": [run.name for run in comparison.runs],
        "settings": {row.name: list(row.values) for row in comparison.settings},
        "figures": {
            section.key: {row.name: list(row.values) for row in section.rows} for section in comparison.sections
        },
        "notes": list(comparison.notes),
    }


def _problems(folders: Sequence[Path]) -> Iterator[str]:
    if len(folders) < 2:
        yield "RUN: there is one run; name at least one more to compare it with"
    if len(folders) > MAX_RUNS:
        yield f"RUN: there are {len(folders)} runs; compare at most {MAX_RUNS} at a time"
    places = [folder.resolve() for folder in folders]
    for place in sorted({place for place in places if places.count(place) > 1}):
        yield f"RUN {place}: is named {places.count(place)} times; name each run once"


def _notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    for run in runs:
        if not run.updates:
            yield f"{run.name} has trained no update, so learning is not compared. Compare again when it has."
        elif (shown := len(run.updates)) < run.summary["updates"]:
            yield f"Charts show {count(shown)} of the {count(run.summary['updates'])} updates of {run.name}."
    if all(run.updates for run in runs) and not reach(runs).updates:
        ranges = ", ".join(f"{run.name} {run.updates[0].update}–{run.updates[-1].update}" for run in runs)
        yield f"The runs have no common updates ({ranges}), so they are compared by time only."
    supervised = [run.name for run in runs if run.spec.mode == "SFT"]
    if supervised and len(supervised) < len(runs):
        yield f"Only {', '.join(supervised)} trained on examples (mode SFT): losses of different modes do not compare."
