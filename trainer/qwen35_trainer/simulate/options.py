"""What the commands are asked, read as a load and changes to it: every problem at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from qwen35_trainer.simulate.changes import Change, LoadRefused
from qwen35_trainer.simulate.hardware import Engine, EnginePool, Trainer
from qwen35_trainer.simulate.lengths import BoundedPareto, Replayed
from qwen35_trainer.simulate.load import Load
from qwen35_trainer.simulate.manifest import SPEED_PER_DOUBLING, Speeds, load_of
from qwen35_trainer.spec import ManifestError, load_manifest
from qwen35_trainer.spec.training import TrainingSpec

PARETO_FLOOR: Final = 64
"""A Pareto tail begins at this part of its cap."""


@dataclass(frozen=True)
class Options:
    """As they stand on the command line; None where an option was not given."""

    file: Path | None = None
    mean: float | None = None
    cv: float | None = None
    cap: int | None = None
    pareto: float | None = None
    lengths: Path | None = None
    decode: str | None = None
    """BASE,PER_SEQUENCE."""
    train: float | None = None
    lane_speed: float | None = None
    named: tuple[tuple[str, object], ...] = ()
    """Fields of the load that have an option of their own, and values."""
    assignments: tuple[str, ...] = ()
    """--set PATH=VALUE."""


@dataclass(frozen=True)
class Asked:
    """What to simulate."""

    spec: TrainingSpec | None
    """None without a manifest: then it is the reference load."""
    load: Load
    """Before the changes."""
    speeds: Speeds
    changes: tuple[Change, ...]
    given: frozenset[str]
    """Fields that an option set."""


def read(options: Options, problems: list[str]) -> Asked:
    """What of it can be read; every problem of options, manifest and length file goes to `problems`."""
    spec = _collect(problems, lambda: _spec(options.file))
    speeds = _collect(problems, lambda: _speeds(options)) or Speeds()
    load = _collect(problems, lambda: load_of(spec, speeds)) if spec else None
    load = load or Load(
        pools=(EnginePool(engine=Engine(base=speeds.base, per_sequence=speeds.per_sequence)),),
        trainer=Trainer(seconds_per_token=speeds.train),
    )
    lengths = _collect(problems, lambda: _lengths(options, load)) or []
    named = [Change(path, value) for path, value in options.named if value is not None]
    assigned = [_collect(problems, partial(Change.parse, text)) for text in options.assignments]
    own = [*lengths, *named, *(change for change in assigned if change)]
    given = {change.field for change in own}
    given |= {"pools.engine.base"} if options.decode else set()
    given |= {"trainer.seconds_per_token"} if options.train else set()
    given |= {"lane.speed"} if options.lane_speed else set()
    return Asked(spec, load, speeds, (*_lane_speeds(options, load, own, speeds), *own), frozenset(given))


def _spec(file: Path | None) -> TrainingSpec | None:
    return load_manifest(file).spec if file else None


def _speeds(options: Options) -> Speeds:
    """Raises LoadRefused where a number is none, or is not above 0."""
    problems = []
    if (options.decode is None) != (options.train is None):
        problems.append("--decode and --train-seconds-per-token share a unit of time: give both, or neither")
    base, per_sequence = Speeds.base, Speeds.per_sequence
    if options.decode is not None:
        try:
            base, per_sequence = map(float, options.decode.split(","))
            EnginePool(engine=Engine(base=base, per_sequence=per_sequence))
        except ValueError as error:
            reason = f": {error}" if options.decode.count(",") == 1 else ""
            problems.append(f"--decode {options.decode}: write BASE,PER_SEQUENCE, two numbers from 0{reason}")
    for name, value in (("--train-seconds-per-token", options.train), ("--lane-speed", options.lane_speed)):
        if value is not None and not 0 < value < float("inf"):
            problems.append(f"{name} {value} <= 0")
    if problems:
        raise LoadRefused(problems)
    train = Speeds.train if options.train is None else options.train
    return Speeds(base, per_sequence, train, options.lane_speed or SPEED_PER_DOUBLING)


def _lengths(options: Options, load: Load) -> list[Change]:
    """Raises LoadRefused for options that exclude each other, and for a file that cannot be read."""
    kinds = [
        name
        for name, value in (
            ("--mean or --cv", options.mean or options.cv),
            ("--pareto", options.pareto),
            ("--lengths", options.lengths),
        )
        if value is not None
    ]
    if len(kinds) > 1:
        raise LoadRefused([f"{' and '.join(kinds)}: each says what the lengths are; use one"])
    cap = load.lengths.cap if options.cap is None else options.cap
    if options.lengths is not None:
        limit = None if options.cap is None and options.file is None else cap
        return [Change("lengths", _replayed(options.lengths, limit))]
    if options.pareto is not None:
        try:
            return [Change("lengths", BoundedPareto(options.pareto, max(1, cap // PARETO_FLOOR), cap))]
        except ValueError as error:
            raise LoadRefused(str(error).split("; ")) from error
    named = (("lengths.mean", options.mean), ("lengths.cv", options.cv), ("lengths.cap", options.cap))
    return [Change(path, value) for path, value in named if value is not None]


def _replayed(file: Path, cap: int | None) -> Replayed:
    """The lengths of a file, cut off where generation would stop."""
    try:
        seen = Replayed.read(file)
    except OSError as error:
        raise LoadRefused([f"--lengths {file}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise LoadRefused([f"--lengths {file}: byte {error.start} is not UTF-8"]) from error
    except ValueError as error:
        raise LoadRefused([f"--lengths {problem}" for problem in str(error).split("; ")]) from error
    if cap is None or cap < 1:
        return seen
    return Replayed(tuple(tuple(min(tokens, cap) for tokens in prompt) for prompt in seen.prompts))


def _lane_speeds(options: Options, load: Load, own: Sequence[Change], speeds: Speeds) -> list[Change]:
    """A lane that only the options make decodes like the pool, not like the reference load."""
    if options.decode is None or load.lane is not None or not any(change.segments[0] == "lane" for change in own):
        return []
    return [Change("lane.base", speeds.base), Change("lane.per_sequence", speeds.lane_per_sequence)]


def _collect[T](problems: list[str], part: Callable[[], T]) -> T | None:
    try:
        return part()
    except ManifestError as error:
        problems += [
            ": ".join(filter(None, (str(error.file), problem.path, f"{problem.message} {problem.fix}")))
            for problem in error.problems
        ]
    except LoadRefused as error:
        problems += error.problems
    return None
