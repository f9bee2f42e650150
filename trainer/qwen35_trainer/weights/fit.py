"""Compares the tensors of a published version of the weights with those that a rollout model expects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class TensorKind(NamedTuple):
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the type in torch, without `torch.`."""


def kinds(weights: Mapping[str, Tensor]) -> dict[str, TensorKind]:
    """Return the shape and type of each tensor, by name.

    For HostWeights, the result comes from their `WeightManifest`, and no tensor is read.
    """
    from_manifest: dict[str, TensorKind] | None = getattr(weights, "kinds", None)
    if from_manifest is not None:
        return from_manifest
    return {
        name: TensorKind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in weights.items()
    }


def shapes(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor, by name.

    For HostWeights, the result comes from their `WeightManifest`, and no tensor is read.
    """
    return {name: kind.shape for name, kind in kinds(weights).items()}


def check_shapes(expected: Mapping[str, tuple[int, ...]], weights: Mapping[str, Tensor], version: int) -> None:
    """Raise ValueError if `weights` does not have exactly the expected tensors and shapes.

    The error names all tensors that are missing, unexpected or of another shape. expected: shape of each tensor of the
    rollout model, by name. version: version of the weights, for the error.
    """
    other = shapes(weights)
    misshapen = sorted(name for name in expected.keys() & other.keys() if expected[name] != other[name])
    if misshapen or expected.keys() != other.keys():
        raise ValueError(
            f"weights of version {version} do not fit the rollout model: missing {sorted(expected.keys() - other.keys())}, "
            f"unexpected {sorted(other.keys() - expected.keys())}, of another shape {misshapen}"
        )


def check_types(weights: Mapping[str, Tensor], version: int) -> None:
    """Raise ValueError, naming the tensors, if tensors in `weights` have a type that is not a floating-point type.

    version: version of the weights, for the error.
    """
    wrong = sorted(name for name, kind in kinds(weights).items() if "float" not in kind.dtype)
    if wrong:
        raise ValueError(
            f"weights of version {version} do not fit the rollout model: no floating-point numbers {wrong}"
        )
