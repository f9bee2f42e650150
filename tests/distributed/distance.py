"""How far two trainings of one model are apart."""

from collections.abc import Mapping

from torch import Tensor


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], scale: Mapping[str, Tensor]) -> float:
    """Maximum over parameters of |ours - theirs| / |scale|. Where the scale is 0, both must be equal.

    Of gradients the scale is the expected gradient; of weights it is what training changed, so that a parameter that never
    stepped is at distance 1, and half the learning rate at 0.5, however small the steps.
    """
    assert ours.keys() == theirs.keys()
    apart = {name: float((ours[name] - tensor).norm()) for name, tensor in theirs.items()}
    return max(each and each / float(scale[name].norm()) for name, each in apart.items())


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor - before[name] for name, tensor in after.items()}
