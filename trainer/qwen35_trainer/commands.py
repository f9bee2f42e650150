"""All commands of `qwen35`. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from qwen35_trainer.exits import CANNOT_RUN, FAILED, INTERRUPTED, REFUSED, SUPERSEDED, fail
from qwen35_trainer.simulate import simulate_commands

app = typer.Typer(
    name="qwen35",
    help="Train Qwen3.5 models by reinforcement learning, on Kubernetes or on this machine.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Manifest: a Qwen35Training as YAML.")]


def _print_version_if(requested: bool) -> None:  # typer calls it with the value of the flag
    if requested:
        print_version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version_if, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Accept options that come before the command."""


@app.command()
def run(
    context: typer.Context,
    file: FileArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, e.g. train.updates=50. May be repeated."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the run. [default: runs/<name>]", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|DIR", help="Continue from the newest checkpoint of this run, or from the one in DIR."
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="cluster|DIR",
            help="Report to an operator and follow its orders: through ConfigMaps, or through files in DIR.",
        ),
    ] = None,
) -> None:
    """Run a training on this machine."""
    from qwen35_trainer.runtime.link.operator_link import CLUSTER
    from qwen35_trainer.runtime.process import set_environment

    set_environment(in_cluster=link == CLUSTER)
    from qwen35_trainer.runtime.prepare import started_at

    started = started_at()
    console = Console()
    from qwen35_trainer.data.data_errors import DataError
    from qwen35_trainer.epoch import FolderRefused, Superseded
    from qwen35_trainer.exits import Interrupted
    from qwen35_trainer.manifest import ManifestError, load_manifest
    from qwen35_trainer.runtime.checkpoint_store import CheckpointError
    from qwen35_trainer.runtime.link.operator_link import LinkRefused
    from qwen35_trainer.runtime.link.reporter import OutcomeUndelivered, reporting
    from qwen35_trainer.runtime.machine import unknown_settings
    from qwen35_trainer.runtime.results import NOTHING_SAVED, failure_text, print_end
    from qwen35_trainer.runtime.run_command import ReportFailed
    from qwen35_trainer.runtime.run_command import run as run_manifest

    if output == "":
        fail("--output is empty; name a folder, or leave it out for runs/<name>", REFUSED)
    how_to_resume = _how_to_resume(file, changes or [], output)
    try:
        with reporting(link) as reporter:
            manifest = load_manifest(file, changes or (), new=resume is None, on_machine=unknown_settings)
            finished = run_manifest(
                manifest,
                file=file,
                output=None if output is None else Path(output),
                resume=resume,
                console=console,
                started=started,
                reporter=reporter,
                signals=context.obj,
                in_cluster=link == CLUSTER,
                how_to_resume=how_to_resume,
            )
    except (LinkRefused, ManifestError, DataError, FolderRefused, CheckpointError) as error:
        fail(str(error), REFUSED)
    except Superseded as superseded:
        fail(str(superseded), SUPERSEDED)
    except Interrupted as interrupted:
        fail(str(interrupted), INTERRUPTED)
    except (ReportFailed, OutcomeUndelivered) as error:
        fail(str(error), INTERRUPTED if isinstance(error.__cause__, Interrupted) else FAILED)
    if finished.finish.outcome == "Failed":
        fail(failure_text(finished, how_to_resume), FAILED)
    print_end(console, finished, how_to_resume)
    if link is None and finished.saved_nothing:
        fail(NOTHING_SAVED, INTERRUPTED)


def _how_to_resume(file: Path, changes: list[str], output: str | None) -> str:
    """Return the `qwen35 run` command that resumes a run started with these arguments."""
    options = [*(word for change in changes for word in ("--set", change)), *(["--output", output] if output else [])]
    return shlex.join(["qwen35", "run", str(file), *options, "--resume", "auto"])


@app.command()
def export(
    what: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CHECKPOINT", help="The folder of a run, for its newest checkpoint, or a checkpoint."
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write. It must not exist, or be empty.")],
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder that the run started from. [default: the manifest's]", show_default=False
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapters, in the format of PEFT.")
    ] = False,
) -> None:
    """Write the trained model as a Hugging Face folder."""
    from qwen35_trainer.epoch import FolderRefused
    from qwen35_trainer.manifest import ManifestError
    from qwen35_trainer.runtime.checkpoint_store import CheckpointError
    from qwen35_trainer.runtime.export_command import ExportRefused
    from qwen35_trainer.runtime.export_command import export as export_model

    try:
        done = export_model(what, output, source=source, adapter=adapter)
    except (ExportRefused, CheckpointError, FolderRefused, ManifestError) as error:
        fail(str(error), REFUSED)
    except OSError as error:
        fail(f"{output} was not written: {error}", FAILED)
    sys.stdout.write(f"{done.folder}: update {done.update} of {done.checkpoint}, {done.size / 1e6:.1f} MB\n")
    if done.template is not None:
        sys.stdout.write(
            f"The run's chat template is not part of this folder: copy data.chatTemplate.file {done.template} to "
            f"{done.folder / 'chat_template.jinja'}\n"
        )


@app.command()
def validate(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE|DIR…", help="Manifests, or folders of them; - is standard input.")
    ],
) -> None:
    """Check manifests and report all problems together. Exit code 2: one is invalid; 3: this release cannot run one."""
    from qwen35_trainer.manifest import ManifestError, cannot_run, load_manifest, next_version
    from qwen35_trainer.manifest.load import manifests_in
    from qwen35_trainer.manifest.problems import beyond_release
    from qwen35_trainer.runtime.machine import unknown_settings

    code = 0
    for file in (file for place in files for file in manifests_in(place)):
        try:
            manifest = load_manifest(file, on_machine=unknown_settings)
        except ManifestError as error:
            code = REFUSED
            sys.stderr.write(f"{error}\n")
            continue
        if beyond := cannot_run(manifest.spec):
            code = code or CANNOT_RUN
            sys.stdout.write(f"{beyond_release(file, beyond)}\n")
        else:
            sys.stdout.write(f"{file}: valid\n")
        if notices := next_version.notices(manifest.spec):
            sys.stdout.write("\n".join(["Before v1beta1, change:", *map(str, notices), ""]))
    raise typer.Exit(code)


@app.command()
def render(
    file: FileArgument,
    namespace: Annotated[
        str | None,
        typer.Option(metavar="NS", help="Namespace. [default: the manifest's, else default]", show_default=False),
    ] = None,
) -> None:
    """Print the objects that the operator would create, as YAML. Exit code 3 if this release cannot run them."""
    from qwen35_operator.render import objects, text, without_owner
    from qwen35_trainer.manifest import ManifestError, cannot_run, load_manifest
    from qwen35_trainer.manifest.problems import beyond_release

    try:
        manifest = load_manifest(file)
        manifests = objects(manifest, namespace=namespace, file=file)
    except ManifestError as error:
        fail(str(error), REFUSED)
    sys.stdout.write(text(without_owner(manifests)))
    if beyond := cannot_run(manifest.spec):
        fail(beyond_release(file, beyond), CANNOT_RUN)


@app.command()
def operator(
    *,
    namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="NS", help="Serve only this namespace. May be repeated. [default: all]"),
    ] = None,
    kubeconfig: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="[default: KUBECONFIG, the pod's, or ~/.kube/config]", show_default=False),
    ] = None,
    kuberay_namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="NS", help="Namespace of KubeRay's operator. May be repeated. [default: kuberay-system]"),
    ] = None,
    lease_namespace: Annotated[str, typer.Option(metavar="NS", help="Namespace of the leader's Lease.")] = "default",
    lease_name: Annotated[str, typer.Option(metavar="NAME", help="Name of the leader's Lease.")] = "qwen35-operator",
    metrics_port: Annotated[int, typer.Option(help="Port of the Prometheus metrics; 0 for none.")] = 8080,
    metrics_authentication: Annotated[
        bool,
        typer.Option("--metrics-authentication", help="Serve metrics only to tokens that may get /metrics."),
    ] = False,
    metrics_certificate: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Serve metrics over HTTPS, with FOLDER/tls.crt and FOLDER/tls.key."),
    ] = None,
    health_port: Annotated[int, typer.Option(help="Port of the probes /healthz and /readyz; 0 for none.")] = 8081,
    workers: Annotated[int, typer.Option(min=1, help="Number of trainings that are reconciled at the same time.")] = 8,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="PROFILE=IMAGE", help="Trainer image of NVIDIA, Ascend or CPU. May be repeated."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"], typer.Option(help="Text lines, or a JSON object per line.")
    ] = "text",
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every step.")] = False,
) -> None:
    """Run the operator until SIGTERM."""
    from qwen35_operator.main import run as run_operator
    from qwen35_operator.operator_settings import (
        KUBERAY_NAMESPACE,
        OperatorSettings,
        SettingsRefused,
        images,
        own_identity,
    )

    try:
        settings = OperatorSettings(
            namespaces=tuple(namespace or ()),
            images=images(image or ()),
            kuberay_namespaces=tuple(kuberay_namespace or (KUBERAY_NAMESPACE,)),
            lease_namespace=lease_namespace,
            lease_name=lease_name,
            identity=own_identity(),
            metrics_port=metrics_port,
            metrics_authentication=metrics_authentication,
            metrics_certificate=metrics_certificate,
            health_port=health_port,
            workers=workers,
        )
        run_operator(settings, kubeconfig, log_format, verbose=verbose)
    except (SettingsRefused, OSError) as error:
        fail(str(error), REFUSED)


NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NS", help="[default: the context's]", show_default=False)
]
KubeconfigOption = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="[default: KUBECONFIG, the pod's, or ~/.kube/config]", show_default=False),
]
ContextOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Context of the kubeconfig. [default: its current one]")
]


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A training. Without NAME, one line per training.")
    ] = None,
    namespace: NamespaceOption = None,
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show trainings of all namespaces.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow the training to its end; exit code 1 if it failed.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --watch one object per change.")] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Show where a training stands, and what it waits for."""
    from qwen35_operator.console import cluster_commands

    cluster = cluster_commands.ClusterAccess(kubeconfig, context, namespace)
    try:
        code = cluster_commands.status(
            cluster, name, everywhere=everywhere, watch=watch, as_json=as_json, console=Console(highlight=False)
        )
    except cluster_commands.NotShown as problem:
        fail(str(problem), REFUSED)
    raise typer.Exit(code)


@app.command()
def report(
    name: Annotated[
        str, typer.Argument(metavar="NAME|RUN", help="A training in a cluster, or the folder of a run on this machine.")
    ],
    namespace: NamespaceOption = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="[default: NAME-report.html, or RUN/report.html]", show_default=False),
    ] = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
) -> None:
    """Write the report of a training, while it runs or afterwards."""
    from qwen35_trainer.runtime.results import is_run

    in_cluster = namespace or kubeconfig or context
    if not in_cluster and ("/" in name or is_run(Path(name))):
        _redraw(Path(name), output)
        return
    from qwen35_operator.console import cluster_commands

    cluster = cluster_commands.ClusterAccess(kubeconfig, context, namespace)
    try:
        code = cluster_commands.report(cluster, name, output, Console(highlight=False))
    except cluster_commands.NotShown as problem:
        fail(str(problem), REFUSED)
    raise typer.Exit(code)


def _redraw(run: Path, output: Path | None) -> None:
    from qwen35_trainer.formatting import counted
    from qwen35_trainer.manifest import ManifestError
    from qwen35_trainer.runtime.results import NotDrawn, redraw

    try:
        drawn = redraw(run, output)
    except (NotDrawn, ManifestError) as problem:
        fail(str(problem), REFUSED)
    updates = counted(drawn.summary["updates"], "update")
    sys.stdout.write(f"Report: {drawn.path} ({drawn.summary['outcome'] or 'so far'}, {updates})\n")


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="The folders of two to eight runs.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Also write a page of tables and charts to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare runs: settings, learning, times, failures."""
    from qwen35_trainer.comparison.compare_command import print_comparison
    from qwen35_trainer.comparison.comparison import ComparisonRefused

    try:
        print_comparison(runs, output, as_json=as_json)
    except ComparisonRefused as refused:
        fail(str(refused), REFUSED)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition, for kubectl apply."""
    from qwen35_operator.api import crd as definition

    sys.stdout.write(definition.text())


app.command()(simulate_commands.simulate)
app.command()(simulate_commands.plan)


@app.command("version")
def print_version() -> None:
    """Print the version."""
    from qwen35_trainer import __version__

    sys.stdout.write(f"{__version__}\n")
