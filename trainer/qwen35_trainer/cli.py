"""`qwen35 …`: every command. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

app = typer.Typer(
    name="qwen35",
    help="Train Qwen3.5 models by reinforcement learning, on Kubernetes or on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit codes: the run failed; it was refused before anything was started; it was ended by a second signal."""

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Manifest: a Qwen35Training as YAML.")]


@app.command()
def run(
    file: FileArgument,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field, e.g. train.updates=50. May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run. [default: runs/<name>]", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="auto|DIR", help="Go on from the newest checkpoint of the output folder, or from DIR."),
    ] = None,
) -> None:
    """Run a training on this machine."""
    from qwen35_trainer.runtime.prepare import started_at

    started = started_at()
    console = Console()
    from qwen35_trainer.data.errors import DataError
    from qwen35_trainer.runtime.checkpoint import CheckpointError
    from qwen35_trainer.runtime.ending import print_end
    from qwen35_trainer.runtime.folder import FolderRefused
    from qwen35_trainer.runtime.run import Interrupted, ReportFailed
    from qwen35_trainer.runtime.run import run as run_manifest
    from qwen35_trainer.spec import ManifestError, load_manifest

    try:
        manifest = load_manifest(file, changes or ())
        finished = run_manifest(manifest, file=file, output=output, resume=resume, console=console, started=started)
    except (ManifestError, DataError, FolderRefused, CheckpointError) as error:
        _fail(str(error), REFUSED)
    except Interrupted as interrupted:
        _fail(str(interrupted), INTERRUPTED)
    except ReportFailed as error:
        _fail(str(error), FAILED)
    if finished.finish.outcome == "Failed":
        _fail(f"{finished.finish.message}\nLogs: {finished.folder.logs}", FAILED)
    print_end(console, finished)


@app.command()
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Manifests.")],
) -> None:
    """Check manifests, all problems of all files at once."""
    from qwen35_trainer.spec import ManifestError, load_manifest

    wrong = 0
    for file in files:
        try:
            load_manifest(file)
        except ManifestError as error:
            wrong += 1
            sys.stderr.write(f"{error}\n")
        else:
            sys.stdout.write(f"{file}: valid\n")
    if wrong:
        raise typer.Exit(REFUSED)


@app.command()
def crd() -> None:
    """Print the CustomResourceDefinition, for kubectl apply."""
    from qwen35_operator.api import crd as definition

    sys.stdout.write(definition.text())


@app.command()
def version() -> None:
    """Print the version."""
    from qwen35_trainer import __version__

    sys.stdout.write(f"{__version__}\n")


def _fail(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"{text}\n")
    raise typer.Exit(code)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
