"""The Hugging Face tensors that make up each parameter of megatron-core, and the parameter's division over tensor-parallel ranks.

A published tensor has the name and shape that it has in a checkpoint folder in the format of Hugging Face.

    published tensors ─► merge ─► whole parameter ─► cut ─► one part per tensor-parallel rank
                      ◄─ divide ◄─                 ◄─ join ◄─

`OUTER_ROWS`, `LAYER_ROWS` and `EXPERT_ROWS` are the table, for a text model; `tower_rows` adds a vision tower. The conversion
is exact in both directions: values are moved, never computed. Gradients and AdamW's moments have the shape of their parameter, so the table converts them, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qwen35_trainer.models.qwen3_5.classes import HFConfig, layer_types


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model that the arrangement of parameters depends on."""

    query_heads: int
    key_value_heads: int
    head_channels: int
    linear_keys: int
    """Channels of all queries of a Gated DeltaNet, and also of all its keys; 0 if the model has no Gated DeltaNet."""
    linear_values: int
    linear_heads: int
    """Number of value heads of a Gated DeltaNet."""

    @classmethod
    def of(cls, model: HFConfig) -> ModelShape:
        attention = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
        if "linear_attention" not in layer_types(model):
            return cls(*attention, 0, 0, 0)
        return cls(
            *attention,
            model.linear_num_key_heads * model.linear_key_head_dim,
            model.linear_num_value_heads * model.linear_value_head_dim,
            model.linear_num_value_heads,
        )


class Arrangement(ABC):
    """The relation between published tensors (Hugging Face), a parameter of megatron-core, and its parts on tensor-parallel ranks.

    By default, a parameter is one published tensor, unchanged.
    """

    def merge(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """Combine published tensors into one whole parameter. The inverse of `divide`.

        tensors: the published tensors of the parameter, in the order of `Row.published`.
        """
        (tensor,) = tensors
        return tensor

    def divide(self, parameter: Tensor, shape: ModelShape, published: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Divide a whole parameter into its published tensors, and return them. The inverse of `merge`.

        published: the shapes of the published tensors.
        """
        return [parameter]

    @abstractmethod
    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        """Return the part of a whole parameter that each of `ranks` tensor-parallel ranks holds.
        The inverse of `join`.
        """

    @abstractmethod
    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        """Return the whole parameter from `parts`, the parts of all tensor-parallel ranks. The inverse of `cut`."""


class Whole(Arrangement):
    """Arrangement of a parameter that every rank holds completely."""

    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        return [parameter] * ranks

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return parts[0]


class ByRows(Arrangement):
    """Arrangement of a parameter of which each rank holds consecutive rows, or consecutive heads."""

    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        return list(parameter.chunk(ranks))

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(parts))


class ByColumns(Arrangement):
    """Arrangement of a parameter of which each rank holds consecutive columns."""

    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        return list(parameter.chunk(ranks, dim=1))

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(parts), dim=1)


class Vocabulary(ByRows):
    """Arrangement of a table with one row per token: each rank holds consecutive rows.

    Rows of zeros are added at the end, so that all ranks have the same number of rows.
    """

    def divide(self, parameter: Tensor, shape: ModelShape, published: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return [parameter[: published[0][0]]]

    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        return super().cut(F.pad(parameter, (0, 0, 0, -len(parameter) % ranks)), ranks, shape)


class BySections(Arrangement):
    """Arrangement of a parameter that consists of several sections of rows. Each rank holds its
    part of every section.
    """

    @abstractmethod
    def sections(self, rows: int, shape: ModelShape) -> list[int]:
        """Return the number of rows of each section of a parameter, such as its gate and its up projection.

        rows: total number of rows of the parameter, or of one rank's part of it.
        """

    def merge(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        return torch.cat(list(tensors))

    def divide(self, parameter: Tensor, shape: ModelShape, published: Sequence[tuple[int, ...]]) -> list[Tensor]:
        return list(parameter.split([rows for rows, *_ in published]))

    def cut(self, parameter: Tensor, ranks: int, shape: ModelShape) -> list[Tensor]:
        sections = [part.chunk(ranks) for part in parameter.split(self.sections(len(parameter), shape))]
        return [torch.cat(parts) for parts in zip(*sections, strict=True)]

    def join(self, parts: Sequence[Tensor], shape: ModelShape) -> Tensor:
        sections = [part.split(self.sections(len(part), shape)) for part in parts]
        return torch.cat([torch.cat(section) for section in zip(*sections, strict=True)])


class GateAndUp(BySections):
    """Sections of a feed-forward input projection: the rows of the gate, then the rows of the up projection.

    In the published model, gate and up projection are one tensor or two.
    """

    def sections(self, rows: int, shape: ModelShape) -> list[int]:
        return [rows // 2, rows // 2]


class LinearInputs(BySections):
    """Sections of a Gated DeltaNet's input projection: queries, keys, values, output gates,
    write strengths and decays.
    """

    def sections(self, rows: int, shape: ModelShape) -> list[int]:
        return _in_proportion(rows, [*_convolved(shape), shape.linear_values, shape.linear_heads, shape.linear_heads])


class LinearFilters(BySections):
    """Arrangement of a Gated DeltaNet's convolution filters, one row per channel. Sections: queries, keys and values."""

    def sections(self, rows: int, shape: ModelShape) -> list[int]:
        return _in_proportion(rows, _convolved(shape))


class QueryKeyValue(ByRows):
    """Arrangement of attention's input projection. Each rank holds consecutive key/value heads.

    For each key/value head, the parameter has blocks of rows: the queries that use the head, their output gates if the
    model has them, the keys and the values. The published query projection has other blocks: for each query head, the
    query, then its gate.
    """

    def merge(self, tensors: Sequence[Tensor], shape: ModelShape) -> Tensor:
        query, key, value = tensors
        blocks = len(query) // (shape.query_heads * shape.head_channels)  # 2 with gates
        by_head = query.unflatten(0, (shape.key_value_heads, -1, blocks, shape.head_channels))
        own = [part.flatten(1, 2) for part in by_head.unbind(2)]
        key, value = (part.unflatten(0, (shape.key_value_heads, -1)) for part in (key, value))
        return torch.cat((*own, key, value), dim=1).flatten(0, 1)

    def divide(self, parameter: Tensor, shape: ModelShape, published: Sequence[tuple[int, ...]]) -> list[Tensor]:
        blocks = published[0][0] // (shape.query_heads * shape.head_channels)  # 2 with gates
        per_group = [shape.query_heads // shape.key_value_heads * shape.head_channels] * blocks
        grouped = parameter.unflatten(0, (shape.key_value_heads, -1))
        *own, key, value = grouped.split((*per_group, shape.head_channels, shape.head_channels), dim=1)
        query = torch.stack([part.unflatten(1, (-1, shape.head_channels)) for part in own], dim=2)
        return [query.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)]


@dataclass(frozen=True)
class Row:
    """One kind of parameter: its name in megatron-core, the names of its published tensors, and their arrangement.

    Names in `LAYER_ROWS` lack the prefix of the layer. In `EXPERT_ROWS`, `megatron` also lacks the
    prefix of the expert.
    """

    megatron: str
    published: tuple[str, ...]
    arrangement: Arrangement


OUTER_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Vocabulary()),
    Row("decoder.final_layernorm.weight", ("model.norm.weight",), Whole()),
    Row("output_layer.weight", ("lm_head.weight",), Vocabulary()),
    Row("mtp.layers.0.enorm.weight", ("mtp.pre_fc_norm_embedding.weight",), Whole()),
    Row("mtp.layers.0.hnorm.weight", ("mtp.pre_fc_norm_hidden.weight",), Whole()),
    Row("mtp.layers.0.eh_proj.weight", ("mtp.fc.weight",), ByRows()),
    Row("mtp.layers.0.final_layernorm.weight", ("mtp.norm.weight",), Whole()),
)
"""Parameters outside layers: embedding, final norm, output layer, and the head for multi-token prediction."""

HEAD_LAYER = "mtp.layers.0.mtp_model_layer."
"""Prefix of the layer of the head for multi-token prediction in megatron-core (published: `prediction_head.LAYER`)."""

LAYER_ROWS = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), Whole()),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Whole()),
    Row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QueryKeyValue(),
    ),
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Whole()),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Whole()),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), ByColumns()),
    Row(
        "self_attention.in_proj.weight",
        (
            "linear_attn.in_proj_qkv.weight",
            "linear_attn.in_proj_z.weight",
            "linear_attn.in_proj_b.weight",
            "linear_attn.in_proj_a.weight",
        ),
        LinearInputs(),
    ),
    Row("self_attention.conv1d.weight", ("linear_attn.conv1d.weight",), LinearFilters()),
    Row("self_attention.A_log", ("linear_attn.A_log",), ByRows()),
    Row("self_attention.dt_bias", ("linear_attn.dt_bias",), ByRows()),
    Row("self_attention.norm_weight", ("linear_attn.norm.weight",), Whole()),
    Row("self_attention.out_proj.weight", ("linear_attn.out_proj.weight",), ByColumns()),
    Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateAndUp()),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), ByColumns()),
    Row("mlp.router.weight", ("mlp.gate.weight",), Whole()),
    Row(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        GateAndUp(),
    ),
    Row("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_expert.down_proj.weight",), ByColumns()),
    Row("mlp.shared_experts.gate_weight", ("mlp.shared_expert_gate.weight",), Whole()),
)
"""Parameters of a layer. Names lack the prefix of the layer."""

EXPERT_ROWS = (
    Row("linear_fc1.weight", ("mlp.experts.gate_up_proj",), GateAndUp()),
    Row("linear_fc2.weight", ("mlp.experts.down_proj",), ByColumns()),
)
"""Parameters of one expert. `megatron` lacks the prefix of the expert; the published tensor's first
dimension is the experts."""


TEXT = "model."
"""Prefix of the tensors of a text model, as in the table. In a vision-language model they have the prefix of `text_prefix`."""
TOWER = "model.visual."
"""Prefix of the tensors of a vision tower."""


def text_prefix(published: Iterable[str]) -> str:
    """Return the prefix that the tensors of the text model have in a model with these published tensors."""
    inner = "model.language_model."
    return inner if any(name.startswith(inner) for name in published) else TEXT


def tower_rows(published: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each published tensor of the vision tower. The parameters of the tower have the same names and shapes."""
    for name in published:
        if name.startswith(TOWER):
            yield Row(name.removeprefix(TEXT), (name,), Whole())


def _convolved(shape: ModelShape) -> list[int]:
    return [shape.linear_keys, shape.linear_keys, shape.linear_values]


def _in_proportion(rows: int, sizes: Sequence[int]) -> list[int]:
    """Divide `rows` in the proportions of `sizes`, the numbers of rows of the whole parameter's sections."""
    return [size * rows // sum(sizes) for size in sizes]
