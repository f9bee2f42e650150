"""Hugging Face checkpoint folders of this family: a folder's files are checked before any tensor is read.

    config.json ─► class ─► names and shapes of the model ───────┐
    *.safetensors headers ─► names, shapes and dtypes on disk ───┴─► they agree: CheckpointFiles; otherwise one error
                                                                     that lists every difference

The files may store experts packed (one tensor for all experts, as in transformers' modules) or one by one. They may
store a text model alone or as part of a vision-language model. In all cases, `CheckpointFiles` has the names and shapes
of the PyTorch module that is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.models.qwen3_5 import classes
from qwen35_trainer.models.qwen3_5.model_files import FileUnusable, read_headers, read_mapping
from qwen35_trainer.models.qwen3_5.model_types import TEXT_MODEL_TYPES, family_problem

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types in which weights may be stored: name in safetensors → type of torch.

All other types, such as those of quantised checkpoints, are refused."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_MAX_PRINTED_PROBLEMS = 20


class CheckpointUnusable(ValueError):
    """A checkpoint folder cannot be loaded.

    problems: one text per problem, which names the file or tensor, the value and the fix. str() prints the first twenty
    problems and the count of all.
    """

    failure = FailureReason.MODEL_UNUSABLE

    def __init__(self, folder: Path, problems: Iterable[str]) -> None:
        self.folder, self.problems = folder, tuple(problems)
        super().__init__(folder, self.problems)

    def __str__(self) -> str:
        count = len(self.problems)
        lines = [f"{self.folder}: {count} problem{'' if count == 1 else 's'}", *self.problems[:_MAX_PRINTED_PROBLEMS]]
        if count > _MAX_PRINTED_PROBLEMS:
            lines.append(f"… and {count - _MAX_PRINTED_PROBLEMS} more")
        return "\n  ".join(lines)


@dataclass(frozen=True)
class FileTensor:
    """One tensor in one file. `name` is its name in the file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


type _Experts = dict[str, dict[str, dict[int, FileTensor]]]
"""Prefix of the experts of a layer → kind of projection → number of an expert → its tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model, and where the files hold its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[FileTensor, ...], ...]
    """The tensors in files that hold the values. If `stacked`, `pieces` has one tuple per expert, which lists the
    expert's tensors in the order of their rows. Otherwise it has one tuple with one tensor."""
    stacked: bool
    """Whether this tensor consists of experts that are stored one by one."""


@dataclass(frozen=True)
class CheckpointFiles:
    """A checked checkpoint folder: the files hold every tensor of the configured model, and no unexpected tensor."""

    folder: Path
    config: classes.HFConfig
    """Configuration object of transformers; `classes.without_weights(config)` is the model that fits `tensors`."""
    tensors: Mapping[str, StoredTensor]
    """Name of a parameter in the module → stored tensor. A tied output layer is left out."""
    passed: Mapping[str, StoredTensor]
    """Tensors that the module lacks but a rollout engine may use: heads for multi-token prediction (`mtp.*`)."""

    @classmethod
    def open(cls, folder: Path) -> CheckpointFiles:
        """Read the headers of a folder's files and check them, without reading the values of tensors.

        Raises CheckpointUnusable naming all problems.
        """
        config_file = folder / "config.json"
        if not config_file.is_file():
            raise CheckpointUnusable(folder, ["no config.json: name the folder of a Hugging Face checkpoint."])
        if problem := family_problem(_json(config_file)):
            raise CheckpointUnusable(folder, [problem])
        problems: list[str] = []
        pieces = _pieces(folder, problems)
        config = classes.read_config(folder)
        tensors, passed = _as_modules(
            pieces, text_only=config.model_type in TEXT_MODEL_TYPES.values(), problems=problems
        )
        # A file that cannot be read would make every tensor in it missing as well.
        if not problems:
            wanted = {name: tuple(p.shape) for name, p in classes.without_weights(config).named_parameters()}
            problems.extend(_differences(wanted, tensors, tied=config.tie_word_embeddings))
            tensors = {name: tensors[name] for name in wanted if name in tensors}
        if problems:
            raise CheckpointUnusable(folder, problems)
        return cls(folder, config, MappingProxyType(tensors), MappingProxyType(passed))

    @cached_property
    def head(self) -> Mapping[str, StoredTensor]:
        """The tensors of `passed`, with experts that are stored one by one joined as in the module.

        Experts of which tensors are missing are left out.
        """
        head: dict[str, StoredTensor] = {}
        experts: _Experts = {}
        for name, stored in self.passed.items():
            if match := EXPERT.fullmatch(name):
                experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = stored.pieces[0][0]
            else:
                head[name] = stored
        for prefix, kinds in experts.items():
            _stack(prefix, kinds, head, [])
        return MappingProxyType(head)

    def read(self, name: str, *slices: slice) -> Tensor:
        """Read one tensor, or a part of it, in the dtype of the file.

        slices: ranges of the first dimensions, in order, with a step of 1; the other dimensions are read whole. An empty
        range gives an empty tensor. Only the selected part is read from disk, except that an expert stored in its own
        tensors is always read whole. Raises KeyError for an unknown name.
        """
        stored = self.tensors.get(name) or self.head.get(name) or self.passed[name]
        ranges = [range(size)[s] for size, s in zip(stored.shape, slices, strict=False)]
        shape = (*map(len, ranges), *stored.shape[len(ranges) :])
        if 0 in shape:
            return torch.empty(shape, dtype=stored.dtype)
        within = tuple(slice(each.start, each.stop) for each in ranges)
        with ExitStack() as opened:
            files: dict[Path, Any] = {}

            def part(piece: FileTensor, *index: slice) -> Tensor:
                if piece.file not in files:
                    files[piece.file] = opened.enter_context(safe_open(piece.file, "pt"))
                return files[piece.file].get_slice(piece.name)[index or ...]

            if not stored.stacked:
                return part(stored.pieces[0][0], *within)
            experts = stored.pieces[within[0]] if within else stored.pieces
            return torch.stack([torch.cat([part(piece) for piece in expert]) for expert in experts])[:, *within[1:]]


def check_finite(folder: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise CheckpointUnusable if a tensor of `weights` holds NaN or infinity. The error names every such tensor.

    folder: the checkpoint folder, for the error. weights: pairs of a name and a tensor (or a shard of the tensor).
    """
    problems = []
    for name, tensor in weights:
        if wrong := tensor.numel() - int(tensor.isfinite().sum()):
            problems.append(
                f"{name}: {wrong} of {tensor.numel()} values are NaN or infinite; take an earlier checkpoint or "
                "download the file again."
            )
    if problems:
        raise CheckpointUnusable(folder, problems)


def _json(file: Path) -> dict[str, Any]:
    try:
        return read_mapping(file)
    except FileUnusable as error:
        raise CheckpointUnusable(file.parent, [str(error.problem)]) from error


def _pieces(folder: Path, problems: list[str]) -> dict[str, FileTensor]:
    """Read the headers of all files, and return name in the files → tensor.

    Appends a text for each problem to `problems`.
    """
    headers = read_headers(folder)
    problems.extend(map(str, headers.problems))
    problems.extend(
        f"{name}: stored as {header.dtype}, weights are one of {', '.join(DTYPES)}; use the checkpoint before "
        "quantisation."
        for name, header in headers.tensors.items()
        if header.dtype not in DTYPES
    )
    return {
        name: FileTensor(header.file, name, DTYPES.get(header.dtype, torch.float32), header.shape)
        for name, header in headers.tensors.items()
    }


def _as_modules(
    pieces: Mapping[str, FileTensor], *, text_only: bool, problems: list[str]
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return two mappings from names in the PyTorch module: its stored tensors, and tensors that it lacks (`mtp.*`).

    pieces: name in the files → tensor. text_only: whether the module is a text model without a vision tower. Appends a
    text for incomplete experts to `problems`.
    """
    tensors: dict[str, StoredTensor] = {}
    passed: dict[str, StoredTensor] = {}
    experts: _Experts = {}
    for stored_name, piece in pieces.items():
        # transformers 5.5 saves the vision tower under this name.
        name = stored_name.replace("model.language_model.visual.", "model.visual.", 1)
        whole = StoredTensor(piece.dtype, piece.shape, ((piece,),), stacked=False)
        if name.startswith("mtp."):
            passed[name] = whole
            continue
        if text_only:
            if name.startswith("model.visual."):
                continue
            name = name.replace("model.language_model.", "model.", 1)
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = piece
        else:
            tensors[name] = whole
    for prefix, kinds in experts.items():
        _stack(prefix, kinds, tensors, problems)
    return tensors, passed


def _stack(
    prefix: str, kinds: Mapping[str, Mapping[int, FileTensor]], tensors: dict[str, StoredTensor], problems: list[str]
) -> None:
    """Join experts that are stored one by one into two tensors of the PyTorch module, and add the two to `tensors`.

    The tensors are `gate_up_proj`, with the rows of gate above those of up, and `down_proj`. Appends a text for missing
    experts and for different shapes to `problems`.
    """
    count = 1 + max(max(indices) for indices in kinds.values())
    for name, wanted in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        missing = [f"{i}.{kind}" for kind in wanted for i in range(count) if i not in kinds.get(kind, {})]
        if missing:
            problems.append(f"{prefix}: {_some(missing)} missing of {count} experts. Download the checkpoint again.")
            continue
        pieces = tuple(tuple(kinds[kind][i] for kind in wanted) for i in range(count))
        shapes = {tuple(piece.shape for piece in expert) for expert in pieces}
        if len(shapes) > 1:
            problems.append(f"{prefix}.{name}: experts of different shapes {sorted(shapes)}. Download it again.")
            continue
        rows = sum(piece.shape[0] for piece in pieces[0])
        shape = (count, rows, *pieces[0][0].shape[1:])
        tensors[f"{prefix}.{name}"] = StoredTensor(pieces[0][0].dtype, shape, pieces, stacked=True)


def _differences(
    expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor], *, tied: bool
) -> list[str]:
    """Return a text for the tensors that only the PyTorch module has, those that only the files have, and
    each different shape.

    expected: shapes of the module's parameters. stored: tensors in the files. tied: whether the files may also store
    the output layer, which a module with tied embeddings does not list.
    """
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"missing {_some(missing)}: config.json describes another model, or files are missing.")
    embedding = next(shape for name, shape in expected.items() if name.endswith("embed_tokens.weight"))
    allowed = {"lm_head.weight": embedding, **expected} if tied else expected
    if unexpected := [name for name in stored if name not in allowed]:
        problems.append(f"unexpected {_some(unexpected)}: config.json describes another model.")
    problems.extend(
        f"{name}: shape {stored[name].shape}, config.json requires {shape}."
        for name, shape in allowed.items()
        if name in stored and stored[name].shape != shape
    )
    return problems


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
