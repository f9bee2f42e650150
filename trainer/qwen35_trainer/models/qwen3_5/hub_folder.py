"""Write a trained model as a Hugging Face folder: a copy of the source folder, with new values for the trained tensors.

    source:  model-00001-of-00003.safetensors ─► tensor by tensor: trained? new value : unchanged ───► the same file
             config, tokenizer, templates, index ────────────────────────────────────────────────────► copied

Names, the layout of experts, dtypes and the division into files are those of the source. Tensors that were not trained,
such as the head for multi-token prediction without `train.multiTokenPrediction`, are copied. A few files are written at the same time. For each of them, only
one block of a tensor's rows is in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qwen35_trainer.models.qwen3_5.checkpoint_files import DTYPES, CheckpointFiles
from qwen35_trainer.models.qwen3_5.hub_tensors import HEAD
from qwen35_trainer.models.qwen3_5.model_files import INDEX, SINGLE

type PartReader = Callable[..., Tensor]
"""A function that reads a part of a tensor: `read(slice(0, 4), slice(2, 3))`, with one slice for each leading
dimension. It must be thread-safe."""
type TrainedValues = Callable[[str], PartReader | None]
"""A function from the name of a parameter in the module to its reader, or to None if the parameter was not trained. It
must be thread-safe."""

CHECKSUMS = "SHA256SUMS"
"""Name of the file with checksums, in the format of `sha256sum --check`. It is written last."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_EMBEDDING_SUFFIX = "embed_tokens.weight"
_VALUES_PER_BLOCK = 2**19
"""Number of values that are converted at a time. They fit into a processor's cache."""
_COPY_BLOCK_BYTES = 16 * 2**20
"""Number of bytes of an unchanged tensor that are copied at a time."""
_WRITER_THREADS = 4
"""Number of files that are written at the same time, each by a thread that uses one core."""


@dataclass(frozen=True)
class _Place:
    """The part of a parameter of the module that a stored tensor holds."""

    parameter: str
    expert: int | None = None
    start: int = 0
    """Row at which the stored tensor begins, in the parameter or, if `expert` is set, in the expert's
    part of the parameter."""


def write_hub_folder(files: CheckpointFiles, values: TrainedValues, output: Path) -> None:
    """Write a checkpoint in the format of Hugging Face into `output`, an empty folder. Raises OSError if writing fails.

    files: the source checkpoint. The output has the same weight files, with tensors of the same names and shapes.
    values: the trained parameters. A crash leaves the folder incomplete, so callers should write to a temporary name and
    rename the folder afterwards.
    """
    copy_the_rest(files.folder, output)
    places = _places(files)

    def write(name: str) -> None:
        _write_shard(files.folder / name, output / name, places, values)

    with ThreadPoolExecutor(_WRITER_THREADS) as threads:  # files and conversions release the interpreter's lock
        list(threads.map(write, _shards(files.folder)))


def copy_the_rest(source: Path, output: Path) -> None:
    """Copy from `source` to `output` the files that contain no weights, such as the configuration and the tokenizer.

    Hidden files, checksums and subfolders are not copied, except the subfolder additional_chat_templates.
    """
    for path in sorted(source.iterdir()):
        if (
            path.is_file()
            and not path.name.startswith(".")
            and path.suffix not in _WEIGHT_SUFFIXES
            and path.name != CHECKSUMS
        ):
            shutil.copyfile(path, output / path.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, output / templates.name)


def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None) -> None:
    """Write tensors to one safetensors file. Raises OSError if writing fails, for example because the disk is full."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def seal(folder: Path) -> None:
    """Complete a written folder: set the modes of its files by the umask, write checksums of all files,
    and flush all to disk.

    Modes are set because safetensors creates files that only their owner may read. Raises OSError if one
    of these steps fails.
    """
    mask = os.umask(0)
    os.umask(mask)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as threads:  # hashing and the disk release the interpreter's lock
        digests = list(threads.map(_flushed, paths))
    for path in paths:
        path.chmod(0o666 & ~mask)
    folder.chmod(0o777 & ~mask)
    with (folder / CHECKSUMS).open("w") as sums:
        sums.writelines(f"{digest}  {path.relative_to(folder)}\n" for digest, path in zip(digests, paths, strict=True))
        sums.flush()
        os.fsync(sums.fileno())


def _flushed(path: Path) -> str:
    """Flush a file to disk, and return its SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _shards(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return [SINGLE]


def _places(files: CheckpointFiles) -> dict[str, _Place]:
    """Return name of a tensor in the files → the part of a parameter that this tensor holds."""
    places: dict[str, _Place] = {}
    for parameter, stored in (*files.tensors.items(), *files.head.items()):
        for expert, pieces in enumerate(stored.pieces):
            start = 0
            for piece in pieces:
                places[piece.name] = _Place(parameter, expert if stored.stacked else None, start)
                start += piece.shape[0]
    if files.config.tie_word_embeddings:  # a folder may store the output layer nevertheless
        places[HEAD] = _Place(next(name for name in files.tensors if name.endswith(_EMBEDDING_SUFFIX)))
    return places


def _write_shard(source: Path, target: Path, places: Mapping[str, _Place], values: TrainedValues) -> None:
    """Write the file `target` with the header of `source`, and with each tensor at the offset that it has in `source`.

    Tensors that trained get their new values; all others are copied from `source`. The format is described at
    https://github.com/huggingface/safetensors, section Format.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as old, target.open("wb") as new:
        size = old.read(8)
        header = old.read(int.from_bytes(size, "little"))
        new.write(size + header)
        data = new.tell()
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda named: named[1]["data_offsets"]):
            begin, end = (data + offset for offset in entry["data_offsets"])
            old.seek(begin)
            new.seek(begin)
            place = places.get(name)
            part = None if place is None else values(place.parameter)
            if place is None or part is None:
                _copy(old, new, end - begin)
                continue
            for block in _blocks(entry["shape"], place):
                value = part(*block).to(DTYPES[entry["dtype"]]).contiguous()
                new.write(value.flatten().view(torch.uint8).numpy())
            assert new.tell() == end, f"{name}: {new.tell() - begin} bytes for {entry}"


def _blocks(shape: Sequence[int], place: _Place) -> Iterator[tuple[slice, ...]]:
    """Yield slices of a parameter that, concatenated, are a stored tensor.

    Each has a range of rows with about `_VALUES_PER_BLOCK` values. shape: the shape of the stored tensor. place: the
    part of the parameter that the stored tensor holds.
    """
    if not shape:
        yield ()
        return
    expert = () if place.expert is None else (slice(place.expert, place.expert + 1),)
    rows = max(1, _VALUES_PER_BLOCK // max(1, math.prod(shape[1:])))
    for first in range(place.start, place.start + shape[0], rows):
        yield *expert, slice(first, min(first + rows, place.start + shape[0]))


def _copy(old: BinaryIO, new: BinaryIO, size: int) -> None:
    while size:
        block = old.read(min(size, _COPY_BLOCK_BYTES))
        if not block:
            raise OSError(f"{old.name} became shorter while it was read")
        new.write(block)
        size -= len(block)
