"""Builds a workload and the changes to it from the options of `qwen35 simulate` and `qwen35 plan`.

All problems are reported together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from qwen35_trainer.manifest import Manifest, ManifestError, load_manifest
from qwen35_trainer.manifest.assignment import split_path
from qwen35_trainer.manifest.fields import fields
from qwen35_trainer.manifest.training import TrainingSpec
from qwen35_trainer.simulate.cost_model import ReplicaGroup, ReplicaSpeed, TrainSpeed
from qwen35_trainer.simulate.field_changes import FieldChange, WorkloadRefused, is_workload_path
from qwen35_trainer.simulate.manifest_workload import SPEED_FACTOR_PER_DOUBLING, HardwareSpeeds, workload_of
from qwen35_trainer.simulate.response_lengths import BoundedPareto, Replayed
from qwen35_trainer.simulate.workload import Workload

PARETO_CAP_PER_FLOOR: Final = 64
"""Ratio of the maximum to the minimum of Pareto lengths. The option --pareto sets only the exponent."""


@dataclass(frozen=True)
class SimulationOptions:
    """The options of `qwen35 simulate` and `qwen35 plan` on the command line. None: the option was not given."""

    file: Path | None = None
    overrides: tuple[str, ...] = ()
    """Values of --set, each PATH=VALUE, which change fields of the manifest."""
    mean: float | None = None
    cv: float | None = None
    cap: int | None = None
    pareto: float | None = None
    lengths: Path | None = None
    decode: str | None = None
    """Value of --decode, BASE,PER_SEQUENCE: the two terms of the duration of a decode step."""
    train: float | None = None
    lane_speed: float | None = None
    fields: tuple[tuple[str, object], ...] = ()
    """(name of a field of the workload, value) for each such field that has an option, such as --policy."""
    assignments: tuple[str, ...] = ()
    """Values of --workload, each PATH=VALUE, which change fields of the workload."""


@dataclass(frozen=True)
class SimulationInput:
    """The result of reading the options: the spec, the workload, the speeds of the hardware,
    and changes of the workload's fields.
    """

    spec: TrainingSpec | None
    """The spec of the manifest. None: no manifest was given, so the workload is the reference workload."""
    workload: Workload
    """The workload of the spec or the reference workload, before `changes` are applied."""
    speeds: HardwareSpeeds
    """The speeds with which `workload` was computed. The planner uses them for the workloads of other plans."""
    changes: tuple[FieldChange, ...]
    """Changes of fields of the workload, such as --cv=2 and --workload drift=1.1, to be applied together."""
    given_fields: frozenset[str]
    """Paths of the fields of the workload that options set, so that they are not reported as assumed."""


def read_options(options: SimulationOptions, problems: list[str]) -> SimulationInput:
    """Read the manifest, the speeds, the lengths and the changes that the options describe.

    problems: every problem of the options, the manifest and the file of lengths is appended. Defaults take the place of
    what cannot be read, so the result must not be simulated if there are problems.
    """
    misplaced = _misplaced_overrides(options)
    problems += misplaced.values()
    spec = _collect(problems, lambda: _spec(options, misplaced))
    speeds = _collect(problems, lambda: _speeds(options)) or HardwareSpeeds()
    workload = _collect(problems, lambda: workload_of(spec, speeds)) if spec else None
    workload = workload or Workload(
        pools=(ReplicaGroup(replica=ReplicaSpeed(base=speeds.base, per_sequence=speeds.per_sequence)),),
        trainer=TrainSpeed(seconds_per_token=speeds.train),
    )
    lengths = _collect(problems, lambda: _lengths(options, workload)) or []
    named_changes = [FieldChange(path, value) for path, value in options.fields if value is not None]
    assigned = [_collect(problems, partial(FieldChange.parse, text)) for text in options.assignments]
    changes = [*lengths, *named_changes, *(change for change in assigned if change)]
    given_fields = {change.field for change in changes}
    given_fields |= {"pools.replica.base"} if options.decode else set()
    given_fields |= {"trainer.seconds_per_token"} if options.train else set()
    given_fields |= {"lane.speed"} if options.lane_speed else set()
    return SimulationInput(
        spec, workload, speeds, (*_lane_speeds(options, workload, changes, speeds), *changes), frozenset(given_fields)
    )


def _spec(options: SimulationOptions, misplaced: Collection[str]) -> TrainingSpec | None:
    if options.file is None:
        return None
    return load_manifest(options.file, [text for text in options.overrides if text not in misplaced]).spec


def _misplaced_overrides(options: SimulationOptions) -> dict[str, str]:
    """Return `PATH=VALUE` of a --set option → problem, for the options that cannot change the manifest.

    They cannot if no manifest was given, or if the path is a field of the workload, which --workload sets.
    """
    manifest_names = {*fields(Manifest), *fields(TrainingSpec)}
    problems = {}
    for text in options.overrides:
        name = str(split_path(text.partition("=")[0].strip())[0])
        if options.file is None:
            problems[text] = (
                f"--set {text}: changes a manifest, and none is given; for the workload use --workload {text}"
            )
        elif name not in manifest_names and is_workload_path(name):
            problems[text] = f"--set {text}: is not a field of the manifest; for the workload use --workload {text}"
    return problems


def _speeds(options: SimulationOptions) -> HardwareSpeeds:
    """Return the speeds of the hardware. Raises WorkloadRefused with every problem of the options that set speeds."""
    problems = []
    if (options.decode is None) != (options.train is None):
        problems.append("--decode and --train-seconds-per-token share a unit of time: give both, or neither")
    base, per_sequence = HardwareSpeeds.base, HardwareSpeeds.per_sequence
    if options.decode is not None:
        try:
            base, per_sequence = map(float, options.decode.split(","))
            ReplicaGroup(replica=ReplicaSpeed(base=base, per_sequence=per_sequence))
        except ValueError as error:
            reason = f": {error}" if options.decode.count(",") == 1 else ""
            problems.append(f"--decode {options.decode}: write BASE,PER_SEQUENCE, two numbers from 0{reason}")
    for name, value in (("--train-seconds-per-token", options.train), ("--lane-speed", options.lane_speed)):
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{name} {value} <= 0")
    if problems:
        raise WorkloadRefused(problems)
    train = HardwareSpeeds.train if options.train is None else options.train
    return HardwareSpeeds(base, per_sequence, train, options.lane_speed or SPEED_FACTOR_PER_DOUBLING)


def _lengths(options: SimulationOptions, workload: Workload) -> list[FieldChange]:
    """Return the changes that give the workload the response lengths that the options describe.

    Raises WorkloadRefused for options that exclude each other, for wrong values, and for a file that cannot be read.
    """
    kinds = [
        name
        for name, value in (
            ("--mean or --cv", options.cv if options.mean is None else options.mean),
            ("--pareto", options.pareto),
            ("--lengths", options.lengths),
        )
        if value is not None
    ]
    if len(kinds) > 1:
        raise WorkloadRefused([f"{' and '.join(kinds)}: each defines the lengths; use one"])
    cap = workload.lengths.cap if options.cap is None else options.cap
    if options.lengths is not None:
        limit = None if options.cap is None and options.file is None else cap
        return [FieldChange("lengths", _replayed(options.lengths, limit))]
    if options.pareto is not None:
        try:
            return [FieldChange("lengths", BoundedPareto(options.pareto, max(1, cap // PARETO_CAP_PER_FLOOR), cap))]
        except ValueError as error:
            raise WorkloadRefused(str(error).split("; ")) from error
    length_options = (("lengths.mean", options.mean), ("lengths.cv", options.cv), ("lengths.cap", options.cap))
    return [FieldChange(path, value) for path, value in length_options if value is not None]


def _replayed(file: Path, cap: int | None) -> Replayed:
    """Return the response lengths in a file. Lengths above `cap` become `cap`, because generation would stop there.

    Raises WorkloadRefused if the file cannot be read or a line is not a length.
    """
    try:
        observed = Replayed.read(file)
    except OSError as error:
        raise WorkloadRefused([f"--lengths {file}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise WorkloadRefused([f"--lengths {file}: byte {error.start} is not UTF-8"]) from error
    except ValueError as error:
        raise WorkloadRefused([f"--lengths {problem}" for problem in str(error).split("; ")]) from error
    if cap is None or cap < 1:
        return observed
    return Replayed(tuple(tuple(min(tokens, cap) for tokens in prompt) for prompt in observed.prompts))


def _lane_speeds(
    options: SimulationOptions, workload: Workload, changes: Sequence[FieldChange], speeds: HardwareSpeeds
) -> list[FieldChange]:
    """Return the changes that give a straggler lane the speeds of --decode, if other options add the lane.

    Without these changes the lane would have the speeds of the reference workload.
    """
    adds_lane = workload.lane is None and any(change.segments[0] == "lane" for change in changes)
    if options.decode is None or not adds_lane:
        return []
    return [FieldChange("lane.base", speeds.base), FieldChange("lane.per_sequence", speeds.lane_per_sequence)]


def _collect[T](problems: list[str], part: Callable[[], T]) -> T | None:
    try:
        return part()
    except ManifestError as error:
        problems += [
            ": ".join(filter(None, (str(error.file), problem.path, f"{problem.message} {problem.fix}")))
            for problem in error.problems
        ]
    except WorkloadRefused as error:
        problems += error.problems
    return None
