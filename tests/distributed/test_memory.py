"""The planned memory of the FSDP engine against the bytes of its tensors."""

from typing import Any

import pytest

from qwen35_trainer.planning import fsdp_memory, parameters
from tests import planned_memory
from tests.planned_memory import assert_within

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "small": ("small", 2, {}),
    "larger": ("larger", 2, {}),
    "recomputed": ("larger", 2, {"activationCheckpointing": True}),
    "experts, recomputed": ("experts", 2, {"activationCheckpointing": True}),
    "an expert mesh": ("experts", 2, {"parallelism": {"expert": 2}}),
    "an expert mesh, all layers gathered": ("experts", 2, {"reshardAfterForward": False, "parallelism": {"expert": 2}}),
    "all layers gathered": ("larger", 2, {"reshardAfterForward": False}),
    "float32": ("small", 2, {"precision": "FP32"}),
    "one rank, micro-batch 2": ("small", 1, {"micro": 2, "activationCheckpointing": True}),
    "copies": ("larger", 2, {"parallelism": {"copies": 2}}),
    "offload of the optimizer": ("small", 2, {"offload": {"optimizer": True}}),
    "tables with Muon's matrices": ("small", 2, {"optimizer": {"type": "Muon"}}),
    "context parallel": ("larger", 2, {"parallelism": {"context": 2}}),
    "a reference model": ("small", 2, {"reference": True}),
    "offload of parameters and gradients": ("small", 2, {"offload": {"parameters": True}}),
    "offload of a reference model": ("small", 2, {"offload": {"parameters": True}, "reference": True}),
    "offload of activations": ("small", 2, {"offload": {"activations": True}, "activationCheckpointing": True}),
    "LoRA": ("small", 2, {"lora": {"rank": 8}}),
    "LoRA of experts": ("experts", 2, {"lora": {"rank": 8}}),
    "LoRA, recomputed": ("small", 2, {"lora": {"rank": 32}, "activationCheckpointing": True}),
    "frozen tables": ("small", 2, {"freeze": ["Embeddings"]}),
}
SELDOM = ("offload of a reference model", "offload of activations", "LoRA of experts", "LoRA, recomputed")


@pytest.mark.torch
@pytest.mark.parametrize(("size", "ranks", "train"), planned_memory.cases(CASES, SELDOM))
def test_planned_memory_is_what_the_engine_holds(groups, size: str, ranks: int, train: dict[str, Any]) -> None:
    document = planned_memory.spec(size, ranks, **train)
    counted = groups(ranks).run(
        "memory", spec=document, batch=planned_memory.batch_for(document), vocabulary=planned_memory.VOCABULARY
    )
    planned = fsdp_memory.rank_memory(
        planned_memory.shape(size), planned_memory.parsed(document), "Torch", pictures=False
    )
    assert_within(planned.device.total + planned.host, max(each["peak"] for each in counted))
    # The plan counts the gradients in host memory, where they exist only during an update.
    gradients = (
        4 * parameters.text(planned_memory.shape(size)).total / ranks if "parameters" in train.get("offload", {}) else 0
    )
    assert_within(planned.state + planned.host - gradients, max(each["state"] for each in counted))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "train"),
    [
        (1, {"micro": 4}),
        (2, {"micro": 2, "activationCheckpointing": True}),
        (2, {"micro": 2, "parallelism": {"context": 2}}),
    ],
    ids=["one rank", "recomputed", "context parallel"],
)
def test_planned_memory_has_what_the_vision_tower_computes(groups, ranks: int, train: dict[str, Any]) -> None:
    document = planned_memory.pictured_spec(ranks, **train)
    batch, vocabulary = planned_memory.batch_of_pictures(), planned_memory.VOCABULARY
    counted = groups(ranks).run("memory", spec=document, batch=batch, vocabulary=vocabulary, pictured=True)
    shape, spec = planned_memory.shape("tower"), planned_memory.parsed(document)
    planned = fsdp_memory.rank_memory(shape, spec, "Torch", pictures=True)
    computed = planned.device.total - planned.state
    assert planned_memory.of_tower(shape, spec) > 0.2 * computed
    assert_within(computed, max(each["peak"] - each["state"] for each in counted))


@pytest.mark.torch
def test_a_frozen_tower_keeps_no_activations(groups) -> None:
    document = planned_memory.pictured_spec(1, micro=4, freeze=["Vision"])
    batch, vocabulary = planned_memory.batch_of_pictures(), planned_memory.VOCABULARY
    [counted] = groups(1).run("memory", spec=document, batch=batch, vocabulary=vocabulary, pictured=True)
    shape, spec = planned_memory.shape("tower"), planned_memory.parsed(document)
    planned = fsdp_memory.rank_memory(shape, spec, "Torch", pictures=True)
    assert_within(planned.device.total - planned.state, counted["peak"] - counted["state"])
