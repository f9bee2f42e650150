"""A trained model as a Hugging Face folder: the folder that it came from, with new values for what was trained.

    source:  model-00001-of-00003.safetensors ─► tensor by tensor: trained? its new value : as it is ─► the same file
             config, tokenizer, templates, index ────────────────────────────────────────────────────► copied

So names, the layout of experts, types and shards are those of the source, and heads for multi-token prediction and whatever else
was not trained pass through. At most one shard and the tensor that is read are in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen35_trainer.models.qwen3_5.checkpoint_files import INDEX, SINGLE, CheckpointFiles
from qwen35_trainer.models.qwen3_5.export import HEAD

type Values = Callable[[str], Tensor | None]
"""The trained value of a parameter by its name in the module; None for one that was not trained."""

CHECKSUMS = "SHA256SUMS"
"""Written last, as `sha256sum --check` reads it."""
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class _Place:
    """Which part of a parameter of the module a stored tensor holds."""

    parameter: str
    expert: int | None = None
    start: int = 0
    """First row within the expert."""


def write_hub_folder(files: CheckpointFiles, values: Values, output: Path) -> None:
    """Write into `output`, an empty folder. A crash leaves it incomplete: write aside and rename. Raises OSError."""
    copy_the_rest(files.folder, output)
    places = _places(files)
    for name in _shards(files.folder):
        _write_shard(files.folder / name, output / name, places, values)


def copy_the_rest(source: Path, output: Path) -> None:
    """Everything beside the weights: configuration, tokenizer, processor, templates, licence."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and path.name != CHECKSUMS:
            shutil.copyfile(path, output / path.name)
    if (templates := source / "additional_chat_templates").is_dir():
        shutil.copytree(templates, output / templates.name)


def save(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None) -> None:
    """Write a file of safetensors. Raises OSError, for a full disk too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, file, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def seal(folder: Path) -> None:
    """Write the checksums of all files, set their modes by the umask, and flush them to disk. Raises OSError.

    safetensors creates files that only their owner may read.
    """
    lines = []
    mask = os.umask(0)
    os.umask(mask)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder)}\n")
            os.fsync(file.fileno())
        path.chmod(0o666 & ~mask)
    folder.chmod(0o777 & ~mask)
    with (folder / CHECKSUMS).open("w") as sums:
        sums.writelines(lines)
        sums.flush()
        os.fsync(sums.fileno())


def _shards(folder: Path) -> list[str]:
    if (folder / INDEX).is_file():
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    return [SINGLE]


def _places(files: CheckpointFiles) -> dict[str, _Place]:
    """By the stored name."""
    places: dict[str, _Place] = {}
    for parameter, stored in files.tensors.items():
        for expert, pieces in enumerate(stored.pieces):
            start = 0
            for piece in pieces:
                places[piece.name] = _Place(parameter, expert if stored.stacked else None, start)
                start += piece.shape[0]
    if files.config.tie_word_embeddings:  # a folder may store the output layer all the same
        places[HEAD] = _Place(next(name for name in files.tensors if name.endswith(_EMBEDDING)))
    return places


def _write_shard(source: Path, target: Path, places: Mapping[str, _Place], values: Values) -> None:
    with safe_open(source, "pt") as opened:
        tensors: dict[str, Tensor] = {}
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            tensor = opened.get_tensor(name)
            place = places.get(name)
            new = None if place is None else values(place.parameter)
            if place is not None and new is not None:
                if place.expert is not None:
                    new = new[place.expert, place.start : place.start + tensor.shape[0]]
                assert new.shape == tensor.shape, f"{name}: {tuple(new.shape)} for {tuple(tensor.shape)}"
                tensor = new.to(tensor.dtype, copy=True).contiguous()
            tensors[name] = tensor
        save(tensors, target, opened.metadata())
