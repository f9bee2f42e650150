"""A mixture of experts of Qwen3, read from a folder of published form by several ranks, against the library's model in a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.distributed.distance import distance
from tests.distributed.group import Group
from tests.distributed.samples import spec_of
from tests.distributed.test_parity import GRADIENTS, PACKED, RATES, SCORES, TOTALS, batches, plain_loop, scores_of
from tests.models import qwen3_moe
from tests.models.rounding import allowed, in_float64

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "context parallel, packed": (2, {"parallelism": {"context": 2}} | PACKED),
    "expert mesh": (2, {"parallelism": {"expert": 2}, "batch": {"microBatchSequences": 4}}),
}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The parent of a folder `model`, and the library's model of it."""
    parent = tmp_path_factory.mktemp("qwen3")
    return parent, qwen3_moe.write(parent / "model")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_those_of_a_plain_loop(groups: Callable[[int], Group], room: tuple[Path, Any], layout: str) -> None:
    parent, library = room
    first = {name: each.clone() for name, each in library.state_dict().items()}
    with torch.no_grad():
        scores = pad_sequence(list(scores_of(library, batches("MoE")[0])), batch_first=True)
    exact = plain_loop(in_float64(library), "MoE")
    expected = plain_loop(library, "MoE")
    library.load_state_dict(first)
    ranks, train = LAYOUTS[layout]
    spec = spec_of(ranks, **train)
    spec["model"]["source"] = {"path": "model"}
    results = groups(ranks).run("train", spec=spec, batches=batches("MoE"), rates=RATES, folder=parent)
    result = results[0]
    assert result["first weights"].keys() == first.keys()
    assert all(torch.equal(result["first weights"][name], each) for name, each in first.items())
    assert max(float((each["scores"][0] - scores).abs().max()) for each in results) <= SCORES
    for place, measured in enumerate(result["metrics"]):
        assert measured.loss == pytest.approx(expected.losses[place], rel=TOTALS[place])
        assert measured.gradient_norm == pytest.approx(expected.norms[place], rel=TOTALS[place])
    scale = allowed(expected.gradients[0], exact.gradients[0], GRADIENTS[0])
    assert distance(result["gradients"][0], expected.gradients[0], scale) <= GRADIENTS[0]
