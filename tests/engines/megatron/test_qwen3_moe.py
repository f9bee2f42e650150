"""A mixture of experts of Qwen3, whose layers all have full attention without an output gate, in every layout of Megatron."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import spec_of
from tests.distributed.test_parity import SCORES, batches, plain_loop, scores_of
from tests.engines.megatron.test_parity import ACROSS, GRADIENTS, TOTAL, joined
from tests.models import qwen3_moe
from tests.models.rounding import allowed, in_float64

pytestmark = pytest.mark.processes

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1 process, recomputed": (1, {}, {"activationCheckpointing": True}),
    "tensor 2, expert 2": (2, {"tensor": 2, "sequence": True, "expert": 2}, {"batch": {"microBatchSequences": 4}}),
    "pipeline 2, uneven": (2, {"pipeline": 2}, {}),
    "tensor 2, pipeline 2, expert 2": (4, {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, {}),
}
UNEVEN = 5
"""Layers of the model in the uneven layout, of which the first stage has three: as 94 layers on 8 stages."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_are_those_of_a_plain_loop(groups: Callable[[int], Group], tmp_path: Path, name: str) -> None:
    ranks, layout, train = LAYOUTS[name]
    library = qwen3_moe.write(tmp_path / "model", **({"num_hidden_layers": UNEVEN} if "uneven" in name else {}))
    built = {key: tensor.clone() for key, tensor in library.state_dict().items()}
    with torch.no_grad():
        scores = pad_sequence(list(scores_of(library, batches("MoE")[0])), batch_first=True)
    exact = plain_loop(in_float64(library), "MoE")
    expected = plain_loop(library, "MoE")
    spec = spec_of(ranks, **train)
    spec["model"]["source"] = {"path": "model"}
    results = groups(ranks).run("train", spec=spec, batches=batches("MoE"), layout=layout, folder=tmp_path)
    result = results[0]
    assert result["first"].keys() == built.keys()
    assert all(torch.equal(result["first"][key], tensor) for key, tensor in built.items()), "load, then export"
    losses, norms = ([getattr(each, field) for each in result["metrics"]] for field in ("loss", "gradient_norm"))
    gradients = joined([part for each in results for part in each["gradients"]], built)
    clipped = {key: gradient * min(1.0, 1.0 / norms[0]) for key, gradient in gradients.items()}
    scale = allowed(expected.gradients[0], exact.gradients[0], GRADIENTS)
    assert max(float((each["scores"][0] - scores).abs().max()) for each in results) <= SCORES
    assert losses[0] == pytest.approx(expected.losses[0], rel=TOTAL)
    assert norms[0] == pytest.approx(expected.norms[0], rel=TOTAL)
    assert distance(clipped, expected.gradients[0], scale) <= GRADIENTS
    assert losses[1:] == pytest.approx(expected.losses[1:], rel=ACROSS)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 4}, "tensor: 4 does not divide num_key_value_heads 2"),
        ({"expert": 3}, "expert: 3 does not divide the model's 4 experts"),
    ],
)
def test_a_layout_that_does_not_divide_it_is_refused_by_name(
    groups: Callable[[int], Group], tmp_path: Path, layout: dict[str, Any], message: str
) -> None:
    qwen3_moe.write(tmp_path / "model")
    spec = spec_of(2)
    spec["model"]["source"] = {"path": "model"}
    with pytest.raises(AssertionError, match=message):
        groups(2).run("train", spec=spec, batches=[], layout=layout, folder=tmp_path)
