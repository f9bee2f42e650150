"""`qwen35 simulate` and `qwen35 plan`: what choices give, without running them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from qwen35_trainer.exits import CANNOT_RUN, REFUSED, fail

if TYPE_CHECKING:
    from qwen35_trainer.simulate.changes import Change
    from qwen35_trainer.simulate.options import Options

Mean = Annotated[float | None, typer.Option(help="Mean of lognormal lengths, in tokens.")]
Cv = Annotated[float | None, typer.Option(help="Their standard deviation over the mean.")]
Cap = Annotated[
    int | None,
    typer.Option(help="Longest. [default: data.maxResponseTokens]", show_default=False),
]
Pareto = Annotated[
    float | None,
    typer.Option(metavar="ALPHA", help="Pareto lengths between cap / 64 and cap instead."),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Lengths seen instead: JSON lines, each a number or {"prompt": KEY, "tokens": NUMBER}.',
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        metavar="BASE,PER_SEQUENCE",
        help="A decode step of a replica takes BASE + PER_SEQUENCE · its sequences, in any unit of time.",
    ),
]
Train = Annotated[float | None, typer.Option(metavar="TIME", help="Training, per token and device, in the same unit.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Any other field of the load, see docs/simulate.md. May be repeated."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Manifest. Without one: the reference load of docs/simulate.md."),
    ] = None,
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            help="deadline-first, or another's rule: fifo, windowed-fifo, completion, synchronous, colocated."
        ),
    ] = None,
    missed_deadline: Annotated[str | None, typer.Option(help="Wait, MaskTokens or Discard.")] = None,
    staleness_threshold: Annotated[float | None, typer.Option(help="The count knob, s.")] = None,
    max_version_lag: Annotated[int | None, typer.Option(help="The age knob, S.")] = None,
    mean: Mean = None,
    cv: Cv = None,
    cap: Cap = None,
    pareto: Pareto = None,
    lengths: Lengths = None,
    decode: Decode = None,
    train_seconds_per_token: Train = None,
    changes: Set = None,
    seed: Annotated[int | None, typer.Option(help="Of the lengths. [default: 0]", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Average over so many seeds.")] = 1,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="A row for each value of an option or of a --set path. May be repeated: for each combination.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Draw it too.")] = None,
    as_json: Json = False,
) -> None:
    """Play the pipeline in virtual time: throughput, lag, idle shares."""
    _require("numpy", *(["plotly"] if plot else []))
    from qwen35_trainer.simulate.options import Options

    options = Options(
        file=file,
        mean=mean,
        cv=cv,
        cap=cap,
        pareto=pareto,
        lengths=lengths,
        decode=decode,
        train=train_seconds_per_token,
        named=(
            ("policy", policy),
            ("missed_deadline", missed_deadline),
            ("staleness_threshold", staleness_threshold),
            ("max_version_lag", max_version_lag),
            ("seed", seed),
        ),
        assignments=tuple(changes or ()),
    )
    with _refusing():
        _simulate(options, sweep or [], seeds, plot, as_json=as_json)


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest: a Qwen35Training as YAML.")],
    *,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Bound of the lag. [default: the manifest's]", show_default=False),
    ] = None,
    mean: Mean = None,
    cv: Cv = None,
    cap: Cap = None,
    pareto: Pareto = None,
    lengths: Lengths = None,
    decode: Decode = None,
    train_seconds_per_token: Train = None,
    lane_speed: Annotated[
        float | None,
        typer.Option(help="Of a lane, for each doubling of its devices. [default: 1.5]"),
    ] = None,
    changes: Set = None,
    as_json: Json = False,
) -> None:
    """Recommend rollout and train nodes, the two knobs and a lane."""
    _require("numpy")
    from qwen35_trainer.simulate.options import Options

    options = Options(
        file=file,
        mean=mean,
        cv=cv,
        cap=cap,
        pareto=pareto,
        lengths=lengths,
        decode=decode,
        train=train_seconds_per_token,
        lane_speed=lane_speed,
        assignments=tuple(changes or ()),
    )
    with _refusing():
        _plan(options, max_lag, as_json=as_json)


def _simulate(options: Options, sweep: list[str], seeds: int, plot: Path | None, *, as_json: bool) -> None:
    from qwen35_trainer.simulate.changes import LoadRefused
    from qwen35_trainer.simulate.document import run_document, sweep_document
    from qwen35_trainer.simulate.manifest import constants
    from qwen35_trainer.simulate.options import read
    from qwen35_trainer.simulate.plot import write_page
    from qwen35_trainer.simulate.sweep import Axis, Row, combinations, run
    from qwen35_trainer.simulate.table import run_table, sweep_table

    problems: list[str] = []
    if plot is not None and not plot.parent.is_dir():
        problems.append(f"--plot {plot}: the folder {plot.parent} does not exist")
    elif plot is not None and plot.is_dir():
        problems.append(f"--plot {plot}: is a folder; name a file in it")
    axes = [axis for text in sweep if (axis := _tried(partial(Axis.parse, text), problems))]
    asked = read(options, problems)
    made = None
    if asked.spec or not options.file:
        made = _tried(lambda: combinations(asked.load, asked.changes, axes), problems)
    if made is None or problems:
        raise LoadRefused(problems)
    loads, left_out = made
    if asked.spec and asked.spec.mode == "Colocated" and any(load.policy != asked.load.policy for _, load in loads):
        # Half of its hardware would be missing: the load of such a manifest counts the devices once.
        raise LoadRefused(
            ["policy: the manifest's mode is Colocated; compare from a FullyAsync one, with --policy colocated"]
        )
    with _progress(len(loads) * seeds) as told:
        rows = [Row(values, load, run(load, seeds, told)) for values, load in loads]
    if plot is not None:
        write_page(plot, rows[0].load, axes, rows)
    # The reference load is a definition; only a manifest leaves something to guess.
    guesses = constants(rows[0].load, asked.given) if asked.spec else ()
    if as_json:
        _print_json(sweep_document(axes, rows, left_out, guesses) if axes else run_document(rows[0], guesses))
    elif axes:
        Console().print(sweep_table(rows[0].load, axes, rows, left_out, seeds))
    else:
        Console().print(run_table(rows[0].load, rows[0].result, seeds, guesses))


def _plan(options: Options, max_lag: int | None, *, as_json: bool) -> None:
    from qwen35_trainer.simulate.changes import LoadRefused, changed
    from qwen35_trainer.simulate.document import plan_document
    from qwen35_trainer.simulate.manifest import constants
    from qwen35_trainer.simulate.options import read
    from qwen35_trainer.simulate.plan import make_plan
    from qwen35_trainer.simulate.table import plan_table
    from qwen35_trainer.spec import cannot_run
    from qwen35_trainer.spec.problems import beyond_release

    problems: list[str] = []
    asked = read(options, problems)
    problems += _chosen_by_plan(asked.changes)
    if asked.spec:
        _tried(lambda: changed(asked.load, asked.changes), problems)
    if asked.spec is None or problems:
        raise LoadRefused(problems)
    with _progress(None) as told:
        made = make_plan(asked.spec, asked.speeds, asked.changes, max_lag, told)
    guesses = constants(made.load, asked.given)
    if as_json:
        _print_json(plan_document(made, guesses))
    else:
        Console().print(plan_table(made, guesses))
    if beyond := cannot_run(asked.spec):
        fail(beyond_release(options.file, beyond), CANNOT_RUN)


def _chosen_by_plan(changes: tuple[Change, ...]) -> list[str]:
    """What --set may not say, since it is the answer, or says how long to look."""
    chosen = {"lane", "policy", "staleness_threshold", "max_version_lag", "on_missed_deadline", "batches", "warm_up"}
    chosen |= {"pools", "pools.count", "trainer", "trainer.units"}
    found = [change for change in changes if change.field in chosen or change.segments[0] == "lane"]
    return [f"--set {change.path}: the plan or the manifest says that; it cannot be set here" for change in found]


def _tried[T](function: Callable[[], T], problems: list[str]) -> T | None:
    from qwen35_trainer.simulate.changes import LoadRefused

    try:
        return function()
    except LoadRefused as error:
        problems += error.problems
        return None


@contextmanager
def _refusing() -> Iterator[None]:
    """Problems are told, and end the command."""
    from qwen35_trainer.simulate.changes import LoadRefused

    try:
        yield
    except LoadRefused as error:
        fail(str(error), REFUSED)
    except OSError as error:
        fail(f"{error.filename}: cannot be written: {error.strerror}", REFUSED)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[], None]]:
    """A line on a terminal that counts the simulations."""
    done = 0
    of = "" if total is None else f" of {total}"
    with Console(stderr=True).status("simulating") as status:

        def told() -> None:
            nonlocal done
            done += 1
            status.update(f"simulated {done}{of}")

        yield told


def _print_json(value: dict[str, Any]) -> None:
    from qwen35_trainer.simulate.document import plain

    sys.stdout.write(f"{json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)}\n")


def _require(*packages: str) -> None:
    """What reading a manifest needs not, and this does."""
    if missing := [package for package in packages if find_spec(package) is None]:
        fail(f"{' and '.join(missing)} not installed: pip install 'qwen35[trainer]'", REFUSED)
