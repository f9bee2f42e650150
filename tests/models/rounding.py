"""How exact a gradient in float32 can be: as near as the library's own comes to its float64 one.

Most parameters agree within 1e-5 of their gradient's norm. A few sum up what nearly cancels (dt_bias), and lose up to a thousand
times more; how much depends on the order of additions, which differs between processors.
"""

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor

MARGIN = 4.0
"""How much farther than the library's another order of additions may be."""


def in_float64(model: Any) -> Any:
    """A copy that computes in float64. What the library casts to float32 itself stays so: routing, and states of the delta rule."""
    model = copy.deepcopy(model)
    model.config.get_text_config()._experts_implementation = "eager"  # the grouped product takes float32 at most
    return model.double()


def allowed(theirs: Mapping[str, Tensor], exact: Mapping[str, Tensor], least: float) -> dict[str, Tensor]:
    """`theirs`, each scaled so that a distance of `least` times its norm is what rounding allows, and at least that."""

    def rounding(name: str) -> float:
        norm = float(exact[name].norm())
        return norm and float((theirs[name].double() - exact[name]).norm()) / norm

    return {name: tensor * max(1.0, MARGIN * rounding(name) / least) for name, tensor in theirs.items()}
