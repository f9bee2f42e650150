"""Reads the small parts of a model's folder: JSON files, and the headers of the files of weights. No tensor is read.

    model.safetensors.index.json ─► names of files ─► *.safetensors headers ─► names, shapes and types of tensors
                                          │                   │
                                          └── missing         └── a pointer of Git LFS, damaged, cut off

This module needs no torch, so that a manifest can be checked quickly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DOWNLOAD = "Download it again."
_POINTER_START = b"version https://git-lfs"


@dataclass(frozen=True)
class FileProblem:
    """A problem of a file in a model's folder, and what to do."""

    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} {self.fix}"


class FileUnusable(ValueError):
    """A file of a model's folder cannot be read. problem: the reason, and what to do."""

    def __init__(self, problem: FileProblem) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True)
class TensorHeader:
    """The description of a tensor in the header of a file. dtype: name of its type in safetensors, such as BF16."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Headers:
    """The headers of all files of weights in a folder. tensors: name in the files → description."""

    tensors: Mapping[str, TensorHeader]
    problems: tuple[FileProblem, ...]


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the contents of a JSON file, which must be a mapping. Raises FileUnusable if they are anything else."""
    if (problem := pointer_problem([file])) is not None:
        raise FileUnusable(problem)
    try:
        contents = json.loads(file.read_bytes())
    except OSError as error:
        raise FileUnusable(_unreadable(file, error)) from error
    except ValueError as error:
        raise FileUnusable(FileProblem(f"{file.name}: not JSON ({error}).", DOWNLOAD)) from error
    if not isinstance(contents, dict):
        raise FileUnusable(FileProblem(f"{file.name}: {type(contents).__name__}, expected a mapping.", DOWNLOAD))
    return contents


def pointer_problem(files: Sequence[Path]) -> FileProblem | None:
    """Return a problem that names those of the files that are pointers of Git LFS. None if there are none."""
    pointers = [file for file in files if _is_pointer(file)]
    if not pointers:
        return None
    named = ", ".join(file.name for file in pointers[:5]) + (
        f" and {len(pointers) - 5} more" if len(pointers) > 5 else ""
    )
    return FileProblem(
        f"{named}: only a pointer of Git LFS, without the contents.", f"Run `git lfs pull` in {files[0].parent}."
    )


def read_headers(folder: Path) -> Headers:
    """Read the headers of all files of weights in a folder, with every problem of these files."""
    try:
        promised = _promised(folder)
    except FileUnusable as error:
        return Headers({}, (error.problem,))
    if promised is None and not (folder / SINGLE).is_file():
        fix = "Download it completely, or convert its weights to safetensors."
        return Headers({}, (FileProblem(f"{folder} has neither {INDEX} nor {SINGLE}.", fix),))
    counts = {SINGLE: 0} if promised is None else Counter(promised.values())
    tensors: dict[str, TensorHeader] = {}
    pointer = pointer_problem([folder / name for name in sorted(counts)])
    problems = [] if pointer is None else [pointer]
    for name in sorted(counts):
        file = folder / name
        if not file.is_file():
            problems.append(FileProblem(f"{name}: missing; {INDEX} places {counts[name]} tensors there.", DOWNLOAD))
        elif not _is_pointer(file):
            try:
                tensors |= _headers_in(file)
            except FileUnusable as error:
                problems.append(error.problem)
    if promised is not None and not problems:
        problems += _misplaced(promised, tensors)
    return Headers(tensors, tuple(problems))


def _promised(folder: Path) -> dict[str, str] | None:
    """Return the index of a folder: name of a tensor → name of its file. None if the folder has no index.

    Raises FileUnusable if the index cannot be read.
    """
    if not (folder / INDEX).is_file():
        return None
    match read_mapping(folder / INDEX).get("weight_map"):
        case dict() as places if places and all(isinstance(file, str) for file in places.values()):
            return places
    raise FileUnusable(FileProblem(f"{INDEX}: no weight_map with a file for each tensor.", DOWNLOAD))


def _headers_in(file: Path) -> dict[str, TensorHeader]:
    """Read the header of a file, and compare it with the size of the file. Raises FileUnusable if they do not agree."""
    from safetensors import SafetensorError, safe_open

    try:
        # The framework matters only for values, which are not read here.
        with safe_open(file, "np") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            return {name: TensorHeader(file, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except OSError as error:
        raise FileUnusable(_unreadable(file, error)) from error
    except SafetensorError as error:
        raise FileUnusable(FileProblem(f"{file.name}: damaged or cut off ({error}).", DOWNLOAD)) from error


def _misplaced(promised: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> list[FileProblem]:
    return [
        FileProblem(f"{name}: {INDEX} places it in {file}, which does not hold it.", "Download both again.")
        for name, file in promised.items()
        if name not in tensors or tensors[name].file.name != file
    ]


def _is_pointer(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(_POINTER_START)) == _POINTER_START
    except OSError:  # reported where the file is read
        return False


def _unreadable(file: Path, error: OSError) -> FileProblem:
    return FileProblem(f"{file.name}: cannot be read ({error.strerror or error}).", "Make it readable.")
