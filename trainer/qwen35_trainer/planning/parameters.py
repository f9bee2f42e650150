"""The number of parameters of a model, by how engines divide them."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35_trainer.catalog.model_sizes import ModelSizes


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a part of a model."""

    divided: int = 0
    """Of matrices that tensor-parallel ranks divide, without experts."""
    repeated: int = 0
    """Of vectors and routers that every tensor-parallel rank has."""
    experts: int = 0
    """Of routed experts."""
    exact: int = 0
    """Of those above, the number that is float32 in every precision (`models/qwen3_5/precision.py`)."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
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
    """Return the parameters of the attention of a layer with full attention."""
    query = shape.query * (2 if shape.output_gate else 1)
    return Parameters(shape.hidden * (query + 2 * shape.key_value + shape.query), 2 * shape.head_dim)


def linear_attention(shape: ModelSizes) -> Parameters:
    """Return the parameters of a Gated DeltaNet."""
    mixed, heads = 2 * shape.linear_keys + shape.linear_values, shape.linear_value_heads
    matrices = shape.hidden * (mixed + 2 * shape.linear_values + 2 * heads)
    return Parameters(
        matrices + mixed * shape.linear_filter + 2 * heads,
        shape.linear_value_dim,
        exact=heads + shape.linear_value_dim,
    )


def feed_forward(shape: ModelSizes) -> Parameters:
    """Return the parameters of the MLP of a layer, or of its experts and their router."""
    if not shape.experts:
        return Parameters(3 * shape.hidden * shape.intermediate)
    router = shape.hidden * shape.experts + (shape.hidden if shape.shared_intermediate else 0)
    experts = 3 * shape.hidden * shape.expert_intermediate * shape.experts
    return Parameters(3 * shape.hidden * shape.shared_intermediate, router, experts)


def layer(shape: ModelSizes, *, linear: bool) -> Parameters:
    """Return the parameters of a decoder layer. linear: whether it is a Gated DeltaNet layer."""
    mixer = linear_attention(shape) if linear else full_attention(shape)
    return mixer + feed_forward(shape) + Parameters(repeated=2 * shape.hidden)


def layers(shape: ModelSizes, first: int = 0, count: int | None = None) -> Parameters:
    """Return the parameters of `count` consecutive decoder layers from `first` on; None: of all that follow."""
    numbers = range(first, shape.layers if count is None else first + count)
    full = sum((number + 1) % shape.full_attention_interval == 0 for number in numbers)
    return layer(shape, linear=False) * full + layer(shape, linear=True) * (len(numbers) - full)


def embedding(shape: ModelSizes) -> Parameters:
    """Return the parameters of the table of tokens. The output layer of an untied model has as many."""
    return Parameters(shape.vocabulary * shape.hidden)


def text(shape: ModelSizes) -> Parameters:
    """Return the parameters of the whole model without its vision tower."""
    tables = 1 if shape.tied else 2
    return layers(shape) + embedding(shape) * tables + Parameters(repeated=shape.hidden)


def vision(shape: ModelSizes) -> int:
    """Return the number of parameters of the vision tower; 0 without one."""
    return 0 if shape.vision is None else shape.vision.parameters(shape.hidden)


def active(shape: ModelSizes) -> int:
    """Return the number of parameters that a token is multiplied by, without the table of input tokens."""
    experts = 3 * shape.hidden * shape.expert_intermediate * shape.experts_per_token
    dense = layers(shape)
    return dense.divided + dense.repeated + shape.layers * experts + shape.vocabulary * shape.hidden
