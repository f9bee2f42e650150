"""Loads manifests from files, and writes them as YAML."""

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from qwen35_trainer.manifest.checks import Check
from qwen35_trainer.manifest.document import dump_document, parse_document
from qwen35_trainer.manifest.overrides import override
from qwen35_trainer.manifest.parse import parse_manifest
from qwen35_trainer.manifest.problems import ManifestError, Problem, either, near
from qwen35_trainer.manifest.resource import Manifest

STDIN = Path("-")
"""The path that means standard input."""
_OUR_KIND = re.compile(rb"^kind:\s*[\"']?qwen35", re.MULTILINE | re.IGNORECASE)


def manifests_in(path: Path) -> list[Path]:
    """Return the paths of the manifests at `path`: the file itself, or all YAML files below a
    folder that contain a Qwen35Training.

    If a folder contains no such file, the folder itself is returned; loading it then reports what is wrong.
    """
    files = sorted(file for file in path.rglob("*") if file.suffix in (".yaml", ".yml") and file.is_file())
    return [file for file in files if _OUR_KIND.search(file.read_bytes())] or [path]


def load_manifest(
    path: Path, overrides: Sequence[str] = (), *, new: bool = True, on_machine: Check | None = None
) -> Manifest:
    """Load a manifest from a file, or from standard input (`STDIN`), and apply `--set` overrides.

    new: whether the manifest is of a new training. False skips the checks that an earlier release did not have, for a
    training that has begun. on_machine: a check of what is installed on this machine, whose problems are reported with the
    others; None: there is none. Raises ManifestError with every problem found.
    """
    document, problems = parse_document(_read(path))
    if problems:
        raise ManifestError(path, problems)
    if isinstance(document, Mapping):
        document, problems = override(document, overrides)
    try:
        manifest = parse_manifest(document, path, new=new, on_machine=on_machine)
    except ManifestError as error:
        raise ManifestError(path, [*problems, *error.problems]) from None
    if problems:
        raise ManifestError(path, problems)
    return manifest


def dump_manifest(manifest: Manifest) -> str:
    """Return the manifest as YAML, with every default. `spec.async` has the values that take effect in the mode.

    `load_manifest` can load the result.
    """
    spec = manifest.spec.model_copy(update={"async_": manifest.spec.effective_async})
    return dump_document(_written(manifest.model_copy(update={"spec": spec})))


def _written(value: object) -> object:
    """Return plain data in the manifest's spelling, without fields that are None by default."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        pairs = [(field.alias or name, getattr(value, name), field.default) for name, field in fields]
        return {key: _written(inside) for key, inside, default in pairs if inside is not None or default is not None}
    if isinstance(value, tuple):
        return [_written(inside) for inside in value]
    return dict(value) if isinstance(value, Mapping) else value


def _read(path: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode()
    except FileNotFoundError:
        raise ManifestError(path, [Problem("", "the file does not exist.", _suggestion(path))]) from None
    except IsADirectoryError:
        raise ManifestError(path, [Problem("", "this is a folder, not a manifest.", _suggestion(path / "-"))]) from None
    except UnicodeDecodeError as error:
        problem = Problem("", f"not valid UTF-8 (byte {error.start}).", "Save the file as UTF-8 text.")
        raise ManifestError(path, [problem]) from None
    except OSError as error:
        problem = Problem("", f"cannot be read: {error.strerror}.", "Give a file that you may read.")
        raise ManifestError(path, [problem]) from None


def _suggestion(path: Path) -> str:
    """Return a hint for a path that does not exist.

    The hint names similar files, or all manifests in the folder, or the part of the path that is missing.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"The folder {folder} does not exist either."
    names = sorted(file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if matches := near(path.name, names):
        return f"Did you mean {either(folder / match for match in matches)}?"
    return f"In {folder}: {', '.join(names)}." if names else f"There is no .yaml file in {folder}."
