"""The planned memory of the Megatron engine against the bytes of its tensors."""

from typing import Any

import pytest
import torch

from qwen35_trainer.planning import head_memory, megatron_memory, parameters
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
    "expert tensor 2": ("experts", 2, {"parallelism": {"expertTensor": 2}, "activationCheckpointing": True}),
    "offload": (
        "small",
        2,
        {
            "activationCheckpointing": True,
            "offload": {"parameters": True, "gradients": True, "optimizer": True},
        },
    ),
    "tensor 2, expert 2": (
        "experts",
        4,
        {"parallelism": {"tensor": 2, "expert": 2}, "activationCheckpointing": True},
    ),
    "tensor 2, pipeline 2": (
        "larger",
        4,
        {"parallelism": {"tensor": 2, "pipeline": 2}, "activationCheckpointing": True},
    ),
    "a reference model": ("small", 2, {"reference": True, "activationCheckpointing": True}),
    "a reference model on two stages": ("larger", 2, {"reference": True, "parallelism": {"pipeline": 2}}),
    "offload of a reference model": (
        "small",
        2,
        {"reference": True, "activationCheckpointing": True, "offload": {"parameters": True}},
    ),
    "wide": ("wide", 1, {"micro": 4}),
    "wide experts": ("wide experts", 1, {"micro": 4}),
    "float32": ("small", 2, {"precision": "FP32", "activationCheckpointing": True}),
}
SELDOM = ("tensor 2, expert 2", "tensor 2, pipeline 2", "offload of a reference model")


@pytest.mark.torch
@pytest.mark.parametrize(("size", "ranks", "train"), planned_memory.cases(CASES, SELDOM))
def test_planned_memory_is_what_the_engine_holds(groups, size: str, ranks: int, train: dict[str, Any]) -> None:
    document = planned_memory.spec(size, ranks, **train)
    document["train"]["engine"] = "Megatron"
    counted = groups(ranks).run(
        "memory", spec=document, batch=planned_memory.batch_for(document), vocabulary=planned_memory.VOCABULARY
    )
    planned = megatron_memory.rank_memory(
        planned_memory.shape(size), planned_memory.parsed(document), "Torch", on_cpu=True
    )
    assert_within(planned.device.total + planned.host, max(each["peak"] for each in counted))
    assert_within(planned.state + planned.host, max(each["state"] for each in counted))


@pytest.mark.torch
@pytest.mark.parametrize("pictures", [False, True], ids=["text only", "pictures"])
@pytest.mark.parametrize("parallelism", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_planned_memory_has_the_vision_tower(groups, parallelism: dict[str, int], pictures: bool) -> None:
    """Its state is compared: the batch shows no picture."""
    document = planned_memory.spec("vision", 2, parallelism=parallelism)
    document["train"]["engine"] = "Megatron"
    batch, vocabulary = planned_memory.batch(), planned_memory.VOCABULARY
    counted = groups(2).run("memory", spec=document, batch=batch, vocabulary=vocabulary, pictures=pictures)
    size, spec = planned_memory.shape("vision"), planned_memory.parsed(document)
    planned = megatron_memory.rank_memory(size, spec, "Torch", on_cpu=True, pictures=pictures)
    assert parameters.vision(size) > 0.5 * parameters.text(size).total
    assert_within(planned.state, max(each["state"] for each in counted))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ranks", "train"),
    [
        (1, {"micro": 4}),
        (2, {"micro": 1, "parallelism": {"pipeline": 2}}),
        (2, {"micro": 1, "parallelism": {"pipeline": 2, "virtualPipeline": 2}}),
        (2, {"micro": 1, "parallelism": {"pipeline": 2, "virtualPipeline": 2}, "activationCheckpointing": True}),
    ],
    ids=["one rank", "pipeline 2", "virtual 2", "virtual 2, recomputed"],
)
def test_planned_memory_has_what_the_vision_tower_computes(groups, ranks: int, train: dict[str, Any]) -> None:
    document = planned_memory.pictured_spec(ranks, **train)
    document["train"]["engine"] = "Megatron"
    batch, vocabulary = planned_memory.batch_of_pictures(), planned_memory.VOCABULARY
    counted = groups(ranks).run("memory", spec=document, batch=batch, vocabulary=vocabulary, pictures=True)
    shape, spec = planned_memory.shape("tower"), planned_memory.parsed(document)
    planned = megatron_memory.rank_memory(shape, spec, "Torch", on_cpu=True, pictures=True)
    computed = planned.device.total - planned.state
    assert planned_memory.of_tower(shape, spec) > 0.2 * computed
    assert_within(computed, max(each["peak"] - each["state"] for each in counted))


@pytest.mark.torch
def test_a_save_holds_a_window_of_the_state_and_one_parameter(groups, tmp_path) -> None:
    """The whole state would be 12 bytes for each parameter. There are the tensors of the file that is written, those of the next
    window, and while a table is published its gathered values and a copy."""
    document = planned_memory.spec("larger", 1)
    document["train"]["engine"] = "Megatron"
    size = planned_memory.shape("larger")
    table = 4 * planned_memory.VOCABULARY * size.hidden
    [counted] = groups(1).run(
        "memory_of_save",
        spec=document,
        batch=planned_memory.batch(),
        vocabulary=planned_memory.VOCABULARY,
        folder=tmp_path,
        window=table,
    )
    assert len(counted["windows"]) > 10
    assert counted["peak"] - counted["before"] <= 4 * table
    state = 12 * parameters.text(size).total
    assert state > 20 * table


@pytest.mark.torch
def test_a_checkpoint_never_has_gradients_and_moments_on_the_device_together(groups, tmp_path) -> None:
    """Both ranks have the whole model, and each holds the moments of a part of it."""
    document = planned_memory.spec("small", 2, offload={"optimizer": True})
    document["train"]["engine"] = "Megatron"
    for counted in groups(2).run(
        "checkpointed",
        spec=document,
        batch=planned_memory.batch(),
        vocabulary=planned_memory.VOCABULARY,
        folder=tmp_path,
    ):
        assert counted["came"] > 4
        assert counted["together"] == 0
        assert counted["unused"] == 0


@pytest.mark.torch
def test_a_step_makes_no_copy_of_moments(groups) -> None:
    """megatron-core clips the gradient of one parameter after another, with a copy of it. AdamW without a fused kernel has two
    copies of a parameter's moments, and on an accelerator the roots of all second moments."""
    document = planned_memory.spec("larger", 1)
    document["train"]["engine"] = "Megatron"
    [more] = groups(1).run(
        "memory_of_step", spec=document, batch=planned_memory.batch(), vocabulary=planned_memory.VOCABULARY
    )
    assert more < 1.5 * 4 * planned_memory.VOCABULARY * planned_memory.shape("larger").hidden


@pytest.mark.torch
@pytest.mark.parametrize("hidden", [16, 512], ids=["small weight", "large weight"])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("precision", "float32_logits"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)],
    ids=["16 bits", "16 bits, float32 logits", "float32"],
)
def test_planned_memory_is_what_the_head_holds(groups, monkeypatch, precision, float32_logits, chunks, hidden) -> None:
    vocabulary, rows = 4096, 32
    monkeypatch.setattr(head_memory, "CHUNK_LOGITS", vocabulary * rows)
    [result] = groups(1).run(
        "head",
        vocabulary=vocabulary,
        hidden=hidden,
        rows=rows * chunks,
        chunk=rows,
        precision=precision,
        float32_logits=float32_logits,
    )
    assert_within(head_memory.megatron(vocabulary, hidden, 1, rows * chunks, precision.itemsize), result["bytes"])


@pytest.mark.torch
def test_the_gradient_of_the_head_is_rounded_once_whatever_the_number_of_chunks(groups) -> None:
    """With a sum in bfloat16 over 64 chunks, the error of the weight's gradient would be a fifth larger."""
    errors = []
    for chunk in (1, 64):
        [result] = groups(1).run(
            "head", vocabulary=512, hidden=64, rows=64, chunk=chunk, precision=torch.bfloat16, float32_logits=True
        )
        errors.append(
            [
                float((ours - exact).norm() / exact.norm())
                for ours, exact in zip(result["computed"], result["exact"], strict=True)
            ]
        )
    for of_scores in errors:
        assert max(of_scores[:2]) < 1e-6
        assert max(of_scores[2:]) < 4e-3
    assert errors[0][3] == pytest.approx(errors[1][3], rel=0.1)
