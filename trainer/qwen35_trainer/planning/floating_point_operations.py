"""Floating-point operations of a forward pass, per token.

2 operations for each parameter that a token is multiplied by (arXiv:2001.08361, table 1), 4 · channels · positions for the products of
full attention with all earlier positions (arXiv:2104.04473, appendix), and for each head of a Gated DeltaNet the products of key, value
and query with its matrix (arXiv:2412.06464, eq. 10). A backward pass has twice the operations of a forward pass.
"""

from __future__ import annotations

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.planning import parameters


def forward(shape: ModelSizes, context: float) -> float:
    """Return the operations of a token with `context` earlier positions; for a whole sequence, half of its length."""
    attention = 4 * shape.query * context * shape.full_layers
    delta = 6 * shape.linear_values * shape.linear_key_dim * shape.linear_layers
    return 2 * parameters.active(shape) + attention + delta
