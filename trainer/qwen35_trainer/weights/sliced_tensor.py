"""A tensor of which this process has only the part that its rank computes with.

    vLLM's loader: narrow, index, chunk, transpose ─► SlicedTensor: the same operation without data, for shape and strides
                   copy_, or anything else that needs values ─► they are looked up in the rank's slice ─► an ordinary tensor

A loader that reads values outside the slice gets the error `SliceMissing`, and never values of another place. Without this check,
a wrong rule in `qwen3_5_divisions.py` would load wrong weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from qwen35_trainer.failure_reasons import FailureReason
from qwen35_trainer.weights.division import HeldSection

VIEWS = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
    torch.ops.aten.view.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.transpose.int,
    torch.ops.aten.t.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}
"""Operations of torch that return views and read no values."""


class SliceMissing(RuntimeError):
    """A loader has read values of a tensor that are not in this rank's slice."""

    failure = FailureReason.MODEL_UNUSABLE


class TensorSlices:
    """The values of one tensor that a rank holds, as one matrix for each section of the tensor."""

    def __init__(self, name: str, held: Sequence[HeldSection], matrix: Callable[[HeldSection], Tensor]) -> None:
        """Create the slices of the tensor `name`.

        held: the rank's part of each section. matrix: returns the values of a held part as a matrix on the host, with
        one row for each index of the section's first dimension. It is called when values of the part are read for the
        first time.
        """
        self.name, self._held, self._matrix = name, held, matrix
        self._matrices: dict[int, Tensor] = {}

    def values(self, view: Tensor) -> Tensor:
        """Return the values of a view of the tensor.

        view: a tensor without data, whose offset and strides refer to the whole tensor. Raises SliceMissing unless the
        rank's part of a single section contains all of these values.
        """
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype)
        for number, held in enumerate(self._held):
            place = _place(view, held)
            if place is not None:
                if number not in self._matrices:
                    self._matrices[number] = self._matrix(held)
                matrix, (row, column, strides) = self._matrices[number], place
                step = matrix.stride(0)
                offset = matrix.storage_offset() + row * step + column
                return matrix.as_strided(view.shape, [rows * step + columns for rows, columns in strides], offset)
        parts = "; ".join(f"rows {_text(each.outer)}, units {_text(each.units)}" for each in self._held)
        raise SliceMissing(
            f"vLLM reads values of {self.name} that are not in this rank's slice ({parts}): shape {tuple(view.shape)}, strides "
            f"{view.stride()}, from value {view.storage_offset()}. Correct the table in weights/qwen3_5_divisions.py"
        )


def _text(numbers: range) -> str:
    return f"{numbers.start} to {numbers.stop}"


def _place(view: Tensor, held: HeldSection) -> tuple[int, int, list[tuple[int, int]]] | None:
    """Return the place of a view in the matrix of a held part.

    None: the matrix does not contain all values of the view. The place is the row and the column of the first value,
    and for each dimension its stride in rows and in columns.
    """
    section = held.section
    width, start = section.units * section.unit, int(view.storage_offset())
    if len(held.units) == section.units:  # whole rows, one after another
        first = start - held.start - held.outer.start * width
        last = first + sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True))
        is_held = first >= 0 and last < len(held.outer) * width
        return (0, first, [(0, step) for step in view.stride()]) if is_held else None
    row, column = divmod(start - held.start, width)
    strides = [
        (0, 0) if size <= 1 else divmod(step, width) for size, step in zip(view.shape, view.stride(), strict=True)
    ]
    if any(rows and columns for rows, columns in strides):
        return None
    last_row = row + sum((size - 1) * rows for size, (rows, _) in zip(view.shape, strides, strict=True))
    last_column = column + sum(
        (size - 1) * columns for size, (_, columns) in zip(view.shape, strides, strict=True) if size
    )
    first_held = held.units.start * section.unit
    if row < held.outer.start or last_row >= held.outer.stop:
        return None
    if column < first_held or last_column >= held.units.stop * section.unit:
        return None
    return row - held.outer.start, column - first_held, strides


class SlicedTensor(Tensor):
    """Stands for a whole tensor, or a view of one, in a process that has only some slices of its values.

    It has a shape and a type, but no memory. An operation that needs values takes them from the slices.
    """

    _view: Tensor
    _slices: TensorSlices

    def __new__(cls, view: Tensor, slices: TensorSlices) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(cls, view.shape, dtype=view.dtype, device=torch.device("cpu"))
        tensor._view, tensor._slices = view, slices
        return tensor

    @classmethod
    def whole(cls, shape: tuple[int, ...], dtype: torch.dtype, slices: TensorSlices) -> SlicedTensor:
        """Return the whole tensor of this shape and type, whose values are in `slices`."""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), slices)

    def held_values(self) -> Tensor:
        """Return the values, as an ordinary tensor on the memory of the slices. Raises SliceMissing if any is not in them."""
        return self._slices.values(self._view)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's documentation says

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation lacks the operator
        cls,
        function: Any,  # noqa: ANN401  # an operator of torch
        _: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # what the operator returns
        options = options or {}
        if function in VIEWS:
            source = arguments[0]
            views = function(source._view, *arguments[1:], **options)
            return pytree.tree_map_only(Tensor, lambda view: cls(view, source._slices), views)
        arguments, options = pytree.tree_map_only(cls, lambda each: each.held_values(), (arguments, options))
        return function(*arguments, **options)
