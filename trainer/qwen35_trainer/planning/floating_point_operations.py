"""Floating-point operations (FLOPs) of a forward pass, per token.

    parameters       2 for each parameter that multiplies a token (arXiv:2001.08361, table 1)
    full attention   4 · channels · positions, for the products with all earlier positions (arXiv:2104.04473, appendix)
    Gated DeltaNet   6 · value channels · channels of a key head, for the products of key, value and query with the state matrix of each
                     head (arXiv:2412.06464, eq. 10)

A backward pass has twice the operations of a forward pass.
"""

from __future__ import annotations

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.planning import parameters


def forward(shape: ModelSizes, context: float) -> float:
    """Return the floating-point operations of the forward pass of one token that
    attends to `context` earlier positions.

    For the mean over all tokens of a sequence, pass half of its length as `context`.
    """
    attention = 4 * shape.query * context * shape.full_layers
    delta = 6 * shape.linear_values * shape.linear_key_dim * shape.linear_layers
    return 2 * parameters.active(shape) + attention + delta
