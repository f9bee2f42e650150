"""Checks images as far as a machine without accelerators and without a container builder can.

    make images-check                                     all images that have their own locks, for all architectures
    python -m images.check trainer-cuda --folder /scratch

step          what it does                                                                       architectures
wheels        finds a wheel of the index for every line of the lock                              all
downloaded    downloads every wheel, compares its hash with the lock, and unpacks it             with --download
installed     makes a virtual environment, compiles `built`, checks all requirements by uv       this machine's
imported      imports the modules of image.yaml, each in a new process                           this machine's

It takes 15 GB of disk for an image, in a folder that it deletes, and is not a part of `make test`. Its results stand in
images/README.md.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from images.definition import MACHINES, Architecture, Definition, definition
from images.locks import PLATFORM, blocks, files, is_current, locked_images, pins
from images.repository import REPOSITORY
from images.versions import versions

SOURCE_ONLY: Final = ("cellpylib", "pycosat", "zss")
"""Packages that reasoning-gym needs and of which the index has the source only. pycosat is written in C."""
DISAGREEMENT: Final = re.compile(
    r"^The package `\S+` requires `(?P<name>[\w-]+)(?:==(?P<wanted>[^ `]+))?[^`]*`, "
    r"but (?:it's not installed|`(?P<present>[^`]+)` is installed)$",
    re.MULTILINE,
)
"""A line of `uv pip check`."""
IMPORT_SECONDS: Final = 300.0
"""Maximum time of one import."""
INSTALL_SECONDS: Final = 3600.0
"""Maximum time of one installation, downloads included."""


@dataclass(frozen=True)
class Result:
    """The result of one step of the check."""

    image: str
    architecture: str
    step: str
    problem: str = ""
    """Empty for success."""

    def __str__(self) -> str:
        problem = "\n".join(self.problem.splitlines()[-12:])
        return f"{self.image:16}{self.architecture:8}{self.step:46}{problem or 'ok'}"


def check(image: str, folder: Path, *, download: bool) -> Iterator[Result]:
    """Yield the results of an image. Leaves nothing in the folder except the resolver's cache."""
    image_definition = definition(image)
    stale = [path for path in files(image_definition) if not is_current(image, REPOSITORY / path)]
    yield Result(image, "", "current", f"run make generate: {', '.join(stale)}" if stale else "")
    for architecture, lock in image_definition.locks.items():
        here = MACHINES[architecture] == platform.machine()
        wheels: list[str | Path] = ["--only-binary", ":all:"]
        wheels += ["--python-platform", f"{MACHINES[architecture]}-{PLATFORM}"]
        wheels += [option for name in SOURCE_ONLY for option in ("--no-binary", name)]
        target: list[str | Path] = ["--target", folder / f"{image}-{architecture}"]
        yield Result(image, architecture, "wheels", _install(folder, lock, *wheels, *target, "--dry-run"))
        if here:
            yield from _installed(image, image_definition, architecture, folder)
        elif download:
            yield Result(
                image, architecture, "downloaded", _install(folder, _wheels_of(lock, folder), *wheels, *target)
            )
        shutil.rmtree(folder / f"{image}-{architecture}", ignore_errors=True)


def _installed(image: str, image_definition: Definition, architecture: Architecture, folder: Path) -> Iterator[Result]:
    """Yield the results of an installation for this machine."""
    environment = folder / f"{image}-environment"
    problem = _run(folder, "uv", "venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    into: list[str | Path] = ["--python", python]
    problem = problem or _install(folder, image_definition.locks[architecture], *into)
    yield Result(image, architecture, "downloaded", problem)
    if problem:
        return
    if image_definition.built:
        variables = image_definition.build_environment | image_definition.check_environment
        variables["PATH"] = f"{python.parent}:{os.environ['PATH']}"
        options = ["--no-build-isolation", "--no-binary", ":all:"]
        built = _install(folder, image_definition.built, *into, *options, variables=variables)
        yield Result(image, architecture, "compiled without the base image", built)
    disagreements = _unexplained(_run(folder, "uv", "pip", "check", *into), image)
    yield Result(image, architecture, "requirements agree", disagreements)
    for name in image_definition.check_without:
        yield Result(image, architecture, f"removed {name}", _run(folder, "uv", "pip", "uninstall", *into, name))
    variables = image_definition.build_environment | image_definition.check_environment
    for module in image_definition.imports:
        problem = _run(folder, python, "-c", f"import {module}", variables=variables)
        yield Result(image, architecture, f"import {module}", problem)
    shutil.rmtree(environment)


def _wheels_of(lock: str, folder: Path) -> str:
    """Return the path of a copy of a lock without the packages that this machine would have to compile for another one."""
    copy = folder / "wheels.txt"
    content = blocks((REPOSITORY / lock).read_text())
    copy.write_text("".join(block for block in content if not pins(block).keys() & set(SOURCE_ONLY)))
    return str(copy)


def _unexplained(report: str, image: str) -> str:
    """Return the lines of uv's report of disagreements that versions.yaml does not explain."""
    absent = {*versions().omitted_from(image), *versions().of(image, "vendor")}
    lines = []
    for match in DISAGREEMENT.finditer(report):
        explained = match["name"] in absent or (match["wanted"] or "").partition("+")[0] == match["present"]
        lines += [] if explained else [match[0]]
    return "\n".join(lines)


def _install(folder: Path, lock: str, *options: str | Path, variables: dict[str, str] | None = None) -> str:
    """Install a lock without dependencies, hashes checked. Returns the problem, or an empty text."""
    command = ["uv", "pip", "install", "--quiet", "--no-config", "--no-deps", "--require-hashes"]
    command += ["--python-version", versions().of("trainer-cpu")["python"]] if "--target" in options else []
    return _run(folder, *command, "--requirement", REPOSITORY / lock, *options, variables=variables)


def _run(folder: Path, *command: str | Path, variables: dict[str, str] | None = None) -> str:
    """Run a command in the folder. Returns what it printed if it failed, or an empty text."""
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    limit = INSTALL_SECONDS if command[0] == "uv" else IMPORT_SECONDS
    try:
        subprocess.run(
            [str(word) for word in command],
            check=True,
            cwd=folder,
            env=environment | (variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"took more than {limit:g} s"
    except subprocess.CalledProcessError as error:
        return str(error.stdout).strip() or f"exit status {error.returncode}"
    return ""


def main(
    images: Annotated[
        list[str] | None, typer.Argument(help="Folders of images/; default: all with their own locks.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where to install; default: the folder for temporary files.")
    ] = None,
    download: Annotated[bool, typer.Option(help="Download the wheels for other architectures, too.")] = False,
) -> None:
    """Check what the images contain. The exit status is 1 if a step fails."""
    failed = False
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for image in images or locked_images():
            for result in check(image, Path(scratch), download=download):
                print(result, flush=True)
                failed = failed or bool(result.problem)
    sys.exit(failed)


if __name__ == "__main__":
    typer.run(main)
