"""The planned memory of the Megatron engine against the bytes of its tensors."""

from typing import Any

import pytest

from qwen35_trainer.planning import megatron_memory
from tests import planned_memory
from tests.planned_memory import assert_within

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("small", 1, {}),
    "data parallel": ("larger", 2, {"activationCheckpointing": True}),
    "tensor 2": ("larger", 2, {"parallelism": {"tensor": 2}, "activationCheckpointing": True}),
    "pipeline 2": ("larger", 2, {"parallelism": {"pipeline": 2}, "activationCheckpointing": True}),
    "pipeline 2, virtual 2": ("larger", 2, {"parallelism": {"pipeline": 2, "virtualPipeline": 2}}),
    "expert 2": (
        "experts",
        2,
        {"parallelism": {"expert": 2}, "activationCheckpointing": True, "router": {"zLoss": 0.001}},
    ),
    "offload": (
        "small",
        2,
        {
            "activationCheckpointing": True,
            "offload": {"parameters": True, "gradients": True, "optimizer": True},
        },
    ),
    "float32": ("small", 2, {"precision": "FP32", "activationCheckpointing": True}),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_planned_memory_is_what_the_engine_holds(groups, case: str) -> None:
    size, ranks, train = CASES[case]
    document = planned_memory.spec(size, ranks, **train)
    document["train"]["engine"] = "Megatron"
    counted = groups(ranks).run(
        "memory", spec=document, batch=planned_memory.batch(), vocabulary=planned_memory.VOCABULARY
    )
    planned = megatron_memory.rank_memory(
        planned_memory.shape(size), planned_memory.parsed(document), "Torch", on_cpu=True
    )
    assert_within(planned.device.total + planned.host, max(each["peak"] for each in counted))
    assert_within(planned.state + planned.host, max(each["state"] for each in counted))
