"""Counts the parameters of a model, separated by how parallel ranks divide them."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a part of a model, by how parallel ranks divide them."""

    divided: int = 0
    """Parameters of matrices that tensor-parallel ranks divide, without routed experts."""
    repeated: int = 0
    """Parameters of vectors and routers, which every tensor-parallel rank has in full."""
    experts: int = 0
    """Parameters of routed experts."""
    exact: int = 0
    """Number of the parameters above that are float32 in every precision (`models/qwen3_5/precision.py`)."""

    @property
    def total(self) -> int:
        """Number of all parameters: divided, repeated and experts."""
        return self.divided + self.repeated + self.experts

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(
            self.divided + other.divided,
            self.repeated + other.repeated,
            self.experts + other.experts,
            self.exact + other.exact,
        )

    def __mul__(self, count: int) -> Parameters:
        return Parameters(self.divided * count, self.repeated * count, self.experts * count, self.exact * count)


def full_attention(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of the attention of a full-attention layer, without the layer's norms."""
    query = shape.query * (2 if shape.output_gate else 1)
    return Parameters(shape.hidden * (query + 2 * shape.key_value + shape.query), 2 * shape.head_dim)


def linear_attention(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of a Gated DeltaNet, without the layer's norms."""
    mixed, heads = 2 * shape.linear_keys + shape.linear_values, shape.linear_value_heads
    matrices = shape.hidden * (mixed + 2 * shape.linear_values + 2 * heads)
    return Parameters(
        matrices + mixed * shape.linear_filter + 2 * heads,
        shape.linear_value_dim,
        exact=heads + shape.linear_value_dim,
    )


def feed_forward(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of the MLP of a layer.

    In a mixture-of-experts model, the router, the experts and the shared expert are counted instead of the MLP.
    """
    if not shape.experts:
        return Parameters(3 * shape.hidden * shape.intermediate)
    router = shape.hidden * shape.experts + (shape.hidden if shape.shared_intermediate else 0)
    experts = 3 * shape.hidden * shape.expert_intermediate * shape.experts
    return Parameters(3 * shape.hidden * shape.shared_intermediate, router, experts)


def layer(shape: ModelSizes, *, linear: bool) -> Parameters:
    """Return the numbers of parameters of a decoder layer.

    linear: whether the layer is a Gated DeltaNet layer; otherwise it has full attention.
    """
    mixer = linear_attention(shape) if linear else full_attention(shape)
    return mixer + feed_forward(shape) + Parameters(repeated=2 * shape.hidden)


def layers(shape: ModelSizes, first: int = 0, count: int | None = None) -> Parameters:
    """Return the numbers of parameters of `count` consecutive decoder layers,
    beginning with the layer of index `first`.

    count: None stands for all layers from `first` to the end of the model.
    """
    numbers = range(first, shape.layers if count is None else first + count)
    full = sum((number + 1) % shape.full_attention_interval == 0 for number in numbers)
    return layer(shape, linear=False) * full + layer(shape, linear=True) * (len(numbers) - full)


def embedding(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of the token embedding.

    An output layer that is not tied to the embedding has the same numbers.
    """
    return Parameters(shape.vocabulary * shape.hidden)


def prediction_head(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of the head for multi-token prediction: its layer, its projection and three norms."""
    return layer(shape, linear=False) + Parameters(2 * shape.hidden**2, 3 * shape.hidden)


def text(shape: ModelSizes) -> Parameters:
    """Return the numbers of parameters of the whole model without its vision tower."""
    tables = 1 if shape.tied else 2
    return layers(shape) + embedding(shape) * tables + Parameters(repeated=shape.hidden)


def vision(shape: ModelSizes) -> int:
    """Return the number of parameters of the vision tower; 0 for a text model."""
    return 0 if shape.vision is None else shape.vision.parameters(shape.hidden)


def active(shape: ModelSizes) -> int:
    """Return the number of parameters with which the forward pass computes one token.

    The token embedding is not counted. Of the experts, only those that a token uses are counted.
    """
    experts = 3 * shape.hidden * shape.expert_intermediate * shape.experts_per_token
    dense = layers(shape)
    return dense.divided + dense.repeated + shape.layers * experts + shape.vocabulary * shape.hidden
