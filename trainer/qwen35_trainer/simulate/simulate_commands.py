"""The commands `qwen35 simulate` and `qwen35 plan`, which estimate a run without running it."""

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
    from qwen35_trainer.planning.resource_plan import ResourcePlan
    from qwen35_trainer.simulate.field_changes import FieldChange
    from qwen35_trainer.simulate.options import SimulationOptions

MeanOption = Annotated[float | None, typer.Option(help="Mean of lognormal response lengths, in tokens.")]
CvOption = Annotated[float | None, typer.Option(help="Standard deviation of the lengths, divided by the mean.")]
CapOption = Annotated[
    int | None,
    typer.Option(help="Maximum length. [default: data.maxResponseTokens]", show_default=False),
]
ParetoOption = Annotated[
    float | None,
    typer.Option(metavar="ALPHA", help="Use Pareto lengths between cap / 64 and cap instead."),
]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help='Use observed lengths instead: JSON lines, each a number or {"prompt": KEY, "tokens": NUMBER}.',
    ),
]
DecodeOption = Annotated[
    str | None,
    typer.Option(
        metavar="BASE,PER_SEQUENCE",
        help="A decode step of a replica with n sequences takes BASE + PER_SEQUENCE · n, in any unit of time.",
    ),
]
TrainOption = Annotated[
    float | None, typer.Option(metavar="TIME", help="Training time per token and device, in the same unit.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a field of the manifest. May be repeated."),
]
WorkloadOption = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="PATH=VALUE",
        help="Change any other field of the workload, see docs/simulate.md. May be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def simulate(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Manifest. Without it: the reference workload of docs/simulate.md."),
    ] = None,
    *,
    policy: Annotated[
        str | None,
        typer.Option(
            help="deadline-first, or a rule for comparison: fifo, windowed-fifo, completion, synchronous, colocated."
        ),
    ] = None,
    missed_deadline: Annotated[str | None, typer.Option(help="Wait, MaskTokens or Discard.")] = None,
    staleness_threshold: Annotated[float | None, typer.Option(help="The staleness threshold, s.")] = None,
    max_version_lag: Annotated[int | None, typer.Option(help="The maximum lag, S.")] = None,
    mean: MeanOption = None,
    cv: CvOption = None,
    cap: CapOption = None,
    pareto: ParetoOption = None,
    lengths: LengthsOption = None,
    decode: DecodeOption = None,
    train_seconds_per_token: TrainOption = None,
    overrides: SetOption = None,
    changes: WorkloadOption = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. [default: 0]", show_default=False)] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds to average over.")] = 1,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B,C",
            help="One row per value of an option or a --workload path. If repeated, one row per combination.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Also write charts to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate the pipeline in virtual time."""
    _require("numpy", *(["plotly"] if plot else []))
    from qwen35_trainer.simulate.options import SimulationOptions

    options = SimulationOptions(
        file=file,
        mean=mean,
        cv=cv,
        cap=cap,
        pareto=pareto,
        lengths=lengths,
        decode=decode,
        train=train_seconds_per_token,
        fields=(
            ("policy", policy),
            ("missed_deadline", missed_deadline),
            ("staleness_threshold", staleness_threshold),
            ("max_version_lag", max_version_lag),
            ("seed", seed),
        ),
        overrides=tuple(overrides or ()),
        assignments=tuple(changes or ()),
    )
    with _exit_on_problems():
        _simulate(options, sweep or [], seeds, plot, as_json=as_json)


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Manifest: a Qwen35Training as YAML.")],
    *,
    max_lag: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Maximum lag. [default: the manifest's bound]", show_default=False),
    ] = None,
    mean: MeanOption = None,
    cv: CvOption = None,
    cap: CapOption = None,
    pareto: ParetoOption = None,
    lengths: LengthsOption = None,
    decode: DecodeOption = None,
    train_seconds_per_token: TrainOption = None,
    lane_speed: Annotated[
        float | None,
        typer.Option(help="Speed-up of a lane for each doubling of its devices. [default: 1.5]"),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Device of the catalog. [default: H100 or Ascend-910B]", show_default=False),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Take training, generation and publication times from this run's records."
        ),
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures", help="The data contain pictures: the vision tower trains.")
    ] = False,
    only_resources: Annotated[
        bool, typer.Option("--resources", help="Print memory, times and what does not fit; simulate nothing.")
    ] = False,
    overrides: SetOption = None,
    changes: WorkloadOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan memory and times; recommend nodes, bounds and a lane."""
    needs = partial(_resources, file, overrides or [], device=device, mean=mean, run=run, pictures=pictures)
    if only_resources or _has_no_split(file, overrides or []):
        _print_resources(needs, as_json=as_json)
        return
    _require("numpy")
    from qwen35_trainer.simulate.options import SimulationOptions

    options = SimulationOptions(
        file=file,
        mean=mean,
        cv=cv,
        cap=cap,
        pareto=pareto,
        lengths=lengths,
        decode=decode,
        train=train_seconds_per_token,
        lane_speed=lane_speed,
        overrides=tuple(overrides or ()),
        assignments=tuple(changes or ()),
    )
    with _exit_on_problems():
        _plan(options, max_lag, needs, as_json=as_json)


def _simulate(options: SimulationOptions, sweep: list[str], seeds: int, plot: Path | None, *, as_json: bool) -> None:
    from qwen35_trainer.simulate.field_changes import WorkloadRefused
    from qwen35_trainer.simulate.manifest_workload import constants
    from qwen35_trainer.simulate.options import read_options
    from qwen35_trainer.simulate.output import run_json, run_table, sweep_json, sweep_table
    from qwen35_trainer.simulate.plot import write_plot
    from qwen35_trainer.simulate.sweep import SweepAxis, SweepRow, combinations, simulate_seeds

    problems: list[str] = []
    if plot is not None and not plot.parent.is_dir():
        problems.append(f"--plot {plot}: the folder {plot.parent} does not exist")
    elif plot is not None and plot.is_dir():
        problems.append(f"--plot {plot}: is a folder; name a file in it")
    axes = [axis for text in sweep if (axis := _collect(partial(SweepAxis.parse, text), problems))]
    inputs = read_options(options, problems)
    table = None
    if inputs.spec or not options.file:
        table = _collect(lambda: combinations(inputs.workload, inputs.changes, axes), problems)
    if table is None or problems:
        raise WorkloadRefused(problems)
    workloads, skipped = table
    other_policy = any(workload.policy != inputs.workload.policy for _, workload in workloads)
    if inputs.spec and inputs.spec.mode == "Colocated" and other_policy:
        # The workload of such a manifest counts the shared devices once, so another policy would lack half of them.
        raise WorkloadRefused(
            ["policy: the manifest's mode is Colocated; compare from a FullyAsync one, with --policy colocated"]
        )
    with _progress(len(workloads) * seeds) as on_simulated:
        rows = [
            SweepRow(values, workload, simulate_seeds(workload, seeds, on_simulated)) for values, workload in workloads
        ]
    if plot is not None:
        write_plot(plot, rows[0].workload, axes, rows)
    # The reference workload is complete; only a manifest requires assumptions.
    assumed = constants(rows[0].workload, inputs.given_fields) if inputs.spec else ()
    if as_json:
        _print_json(sweep_json(axes, rows, skipped, assumed) if axes else run_json(rows[0], assumed))
    elif axes:
        Console().print(sweep_table(rows[0].workload, axes, rows, skipped, seeds))
    else:
        Console().print(run_table(rows[0].workload, rows[0].result, seeds, assumed))


def _resources(
    file: Path, changes: list[str], *, device: str | None, mean: float | None, run: Path | None, pictures: bool
) -> ResourcePlan:
    """Return the memory and the times of a manifest. Ends the command for options that cannot be used."""
    from qwen35_trainer.manifest import ManifestError
    from qwen35_trainer.planning.resource_plan_command import ModelUnknown, PlanRefused, planned

    try:
        return planned(file, changes, device=device, mean=mean, run=run, pictures=pictures)
    except ModelUnknown:
        raise
    except (ManifestError, PlanRefused) as error:
        fail(str(error), REFUSED)


def _has_no_split(file: Path, changes: list[str]) -> bool:
    """Return whether the mode of a manifest has no two pools to divide nodes between, so that only memory and times are planned.

    False for a manifest that cannot be loaded: its problems are reported with those of the options.
    """
    from qwen35_trainer.manifest import ManifestError, load_manifest

    try:
        return load_manifest(file, changes).spec.mode != "FullyAsync"
    except ManifestError:
        return False


def _print_resources(needs: Callable[[], ResourcePlan], *, as_json: bool) -> None:
    """Print the memory and the times of a plan. Exit code 3 if something does not fit."""
    from qwen35_trainer.planning.resource_plan_command import ModelUnknown
    from qwen35_trainer.planning.resource_table import resource_json, resource_table

    try:
        plan = needs()
    except ModelUnknown as unknown:
        fail(str(unknown), REFUSED)
    if as_json:
        _print_json({"resources": resource_json(plan)})
    else:
        Console().print(resource_table(plan))
    if plan.misfits:
        raise typer.Exit(CANNOT_RUN)


def _plan(options: SimulationOptions, max_lag: int | None, needs: Callable[[], ResourcePlan], *, as_json: bool) -> None:
    from qwen35_trainer.manifest import cannot_run
    from qwen35_trainer.manifest.problems import beyond_release
    from qwen35_trainer.planning.resource_table import resource_json
    from qwen35_trainer.simulate.field_changes import WorkloadRefused, apply_changes
    from qwen35_trainer.simulate.manifest_workload import constants
    from qwen35_trainer.simulate.options import read_options
    from qwen35_trainer.simulate.output import plan_json, plan_table, speeds_of_split
    from qwen35_trainer.simulate.plan import make_plan

    problems: list[str] = []
    inputs = read_options(options, problems)
    problems += _fields_of_plan(inputs.changes)
    if inputs.spec:
        _collect(lambda: apply_changes(inputs.workload, inputs.changes), problems)
    if inputs.spec is None or problems:
        raise WorkloadRefused(problems)
    resources = _resources_or_note(needs, as_json=as_json)
    with _progress(None) as on_simulated:
        result = make_plan(inputs.spec, inputs.speeds, inputs.changes, max_lag, on_simulated)
    assumed = constants(result.workload, inputs.given_fields)
    if as_json:
        _print_json(plan_json(result, assumed) | {"resources": resources and resource_json(resources)})
    else:
        if resources is not None and resources.time is not None:
            Console().print(speeds_of_split(result.workload, resources.mean, has_speeds=options.decode is not None))
        Console().print(plan_table(result, assumed))
    if resources is not None and resources.misfits:
        raise typer.Exit(CANNOT_RUN)
    if beyond := cannot_run(inputs.spec):
        fail(beyond_release(options.file, beyond), CANNOT_RUN)


def _resources_or_note(needs: Callable[[], ResourcePlan], *, as_json: bool) -> ResourcePlan | None:
    """Print memory and times before the simulations begin; of a model whose sizes are not known, print why they are missing."""
    from qwen35_trainer.planning.resource_plan_command import ModelUnknown
    from qwen35_trainer.planning.resource_table import resource_table

    try:
        resources = needs()
    except ModelUnknown as unknown:
        sys.stderr.write(f"Memory and times are not planned. {unknown}\n")
        return None
    if not as_json:
        Console().print(resource_table(resources))
    return resources


def _fields_of_plan(changes: tuple[FieldChange, ...]) -> list[str]:
    """Return a problem for each change of a field that --workload may not set in `qwen35 plan`.

    The plan chooses these fields, or they determine the duration of its simulations.
    """
    chosen = {"lane", "policy", "staleness_threshold", "max_version_lag", "on_missed_deadline", "batches", "warm_up"}
    chosen |= {"pools", "pools.count", "trainer", "trainer.units"}
    refused = [change for change in changes if change.field in chosen or change.segments[0] == "lane"]
    return [f"--workload {change.path}: the plan or the manifest determines this field" for change in refused]


def _collect[T](function: Callable[[], T], problems: list[str]) -> T | None:
    from qwen35_trainer.simulate.field_changes import WorkloadRefused

    try:
        return function()
    except WorkloadRefused as error:
        problems += error.problems
        return None


@contextmanager
def _exit_on_problems() -> Iterator[None]:
    """Context manager: print the problems of a refused workload, and end the command."""
    from qwen35_trainer.simulate.field_changes import WorkloadRefused

    try:
        yield
    except WorkloadRefused as error:
        fail(str(error), REFUSED)
    except OSError as error:
        fail(f"{error.filename}: cannot be written: {error.strerror}", REFUSED)


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[], None]]:
    """Context manager: show the number of simulations so far in a status line on the terminal.

    total: the expected number; None: unknown. It yields a function that the caller calls after each simulation.
    """
    done = 0
    of = "" if total is None else f" of {total}"
    with Console(stderr=True).status("simulating") as status:

        def on_simulated() -> None:
            nonlocal done
            done += 1
            status.update(f"simulated {done}{of}")

        yield on_simulated


def _print_json(value: dict[str, Any]) -> None:
    from qwen35_trainer.simulate.output import without_infinities

    sys.stdout.write(f"{json.dumps(without_infinities(value), indent=2, ensure_ascii=False, allow_nan=False)}\n")


def _require(*packages: str) -> None:
    """End the command with a message if one of the packages is not installed."""
    if missing := [package for package in packages if find_spec(package) is None]:
        fail(f"{' and '.join(missing)} not installed: pip install 'qwen35[trainer]'", REFUSED)
