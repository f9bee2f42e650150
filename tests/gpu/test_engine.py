"""The engine on a GPU against its own numbers on the host in float32, and against the transformers library's.

Without a GPU the same tests compare the host with itself, across layouts, and within narrower bounds.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.manifest import parse_spec
from tests.distributed.rank import remembering
from tests.distributed.samples import batch_of, spec_of
from tests.distributed.test_parity import OFFLOAD, PICTURED, batches, library_model, plain_loop
from tests.models.scenes import vision_language

# Head sizes that the kernels of models/qwen3_5/kernels.py take. Those run in bfloat16 only: float32 cases compare torch's
# own operations, which add in another order on a GPU, hence the bounds. The tower's convolution may run in TF32.
SHAPE = {"hiddenSize": 64, "intermediateSize": 128, "headDim": 32, "linearHeadDim": 32}
RATE = 1e-4
FLOAT32 = {"cuda": (1e-3, 1e-2), "cpu": (1e-5, 1e-4)}
BFLOAT16 = {"cuda": {0: (1e-2, 5e-2), 4: (1e-2, 5e-2)}, "cpu": {0: (2e-3, 1e-2), 4: (7e-3, 3e-2)}}
"""Allowed of loss and of gradient norm, relative; for bfloat16 by the number of experts. Over eight models and batches rounding on the
CPU moved the loss by 4e-4 (dense) and 2e-3 (MoE, whose routing it changes) and the norm by 3e-3 and 8e-3, root mean square: these
are at least 3.5 times as much."""
type Totals = tuple[list[float], list[float]]
ON_THE_HOST: dict[str, Totals] = {}
PACKED = {"batch": {"removePadding": True, "dynamicMicroBatches": True, "maxTokensPerDevice": 40}}
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "micro-batch 4": {"batch": {"microBatchSequences": 4}},
    "packed": PACKED,
    "recomputed activations": {"activationCheckpointing": True},
    "parameters on the host": OFFLOAD,
    "optimizer state on the host": {"offload": {"optimizer": True}},
    "LoRA": {"lora": {"rank": 4}},
    "Muon": {"optimizer": {"type": "Muon"}},
}
# Where a vision tower takes part in what differs.
WITH_PICTURES: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": PACKED,
    "parameters on the host": OFFLOAD,
    "packed, parameters on the host": PACKED | OFFLOAD,
}


def engine_on(
    device: torch.device, precision: str, shape: dict[str, Any], *, pictured: dict[str, Any] | None = None, **train: Any
) -> FSDPEngine:
    """Of the random model of that shape, or of a `pictured` vision-language one."""
    document = spec_of(1, random=SHAPE | shape, **train)
    document["model"]["precision"] = precision
    spec, problems = parse_spec(document)
    assert spec is not None, problems
    source = Origin(lambda: remembering(spec, 0) if pictured is None else vision_language(**pictured))
    return FSDPEngine(source, spec, device)


def updates(engine: FSDPEngine, kind: str = "dense") -> Totals:
    """Losses and gradient norms of the batches for that kind of model."""
    metrics = [engine.train(batch, [RATE])[0] for batch in batches(kind)]
    return [each.loss for each in metrics], [each.gradient_norm for each in metrics]


@cache
def of_the_library(kind: str) -> Totals:
    trained = plain_loop(library_model(kind), kind, rate=RATE)
    return trained.losses, trained.norms


def on_the_host(train: dict[str, Any], shape: dict[str, Any]) -> Totals:
    """In float32, without what only lays out the same computation: packing, recomputation, parking, micro-batches."""
    different = {name: settings for name, settings in train.items() if name in ("lora", "optimizer")}
    key = repr((different, shape))
    if key not in ON_THE_HOST:
        ON_THE_HOST[key] = updates(engine_on(torch.device("cpu"), "FP32", shape, **different))
    return ON_THE_HOST[key]


def assert_near(actual: Totals, expected: Totals, bounds: tuple[float, float]) -> None:
    """Relative, of losses and of norms."""
    for own, other, bound in zip(actual, expected, bounds, strict=True):
        assert own == pytest.approx(other, rel=bound)


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "MoE"])
@pytest.mark.parametrize("train", CASES.values(), ids=CASES)
def test_float32_updates_are_those_of_the_host(device: torch.device, train: dict[str, Any], experts: int) -> None:
    shape = {"experts": experts}
    assert_near(updates(engine_on(device, "FP32", shape, **train)), on_the_host(train, shape), FLOAT32[device.type])


@pytest.mark.parametrize("kind", PICTURED)
@pytest.mark.parametrize("train", WITH_PICTURES.values(), ids=WITH_PICTURES)
def test_float32_updates_with_pictures_are_those_of_the_library(
    device: torch.device, train: dict[str, Any], kind: str
) -> None:
    actual = updates(engine_on(device, "FP32", {}, pictured=PICTURED[kind], **train), kind)
    assert_near(actual, of_the_library(kind), FLOAT32[device.type])


@pytest.mark.parametrize(
    ("train", "experts"), [({}, 0), (PACKED, 0), (PACKED, 4)], ids=["padded", "packed", "packed, MoE"]
)
def test_bfloat16_updates_are_near_those_of_float32(device: torch.device, train: dict[str, Any], experts: int) -> None:
    # Under the larger weights of the other cases rounding to bfloat16 alone moves the norm by a tenth and more.
    shape = {"experts": experts, "initializerRange": 0.05}
    assert_near(
        updates(engine_on(device, "BF16", shape, **train)), on_the_host(train, shape), BFLOAT16[device.type][experts]
    )


@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_float32_updates_are_those_of_the_library(device: torch.device, kind: str) -> None:
    document = spec_of(1, random={} if kind == "dense" else {"experts": 4})
    spec, problems = parse_spec(document)
    assert spec is not None, problems
    actual = updates(FSDPEngine(Origin(lambda: remembering(spec, 0)), spec, device))
    assert_near(actual, of_the_library(kind), (1e-4, 1e-3))


def test_a_checkpoint_of_parked_optimizer_state_continues_as_if_never_saved(device: torch.device, tmp_path) -> None:
    train = {"offload": {"optimizer": True}}
    saved, restored = (engine_on(device, "FP32", {}, **train) for _ in range(2))
    first, second = (batch_of(8, seed, supervised=True) for seed in range(2))
    saved.train(first, [1e-3])
    saved.save(tmp_path)
    assert saved.saved(wait=True)
    restored.restore(tmp_path)
    resting = [
        value
        for part in restored._optimizers.parts
        for state in part.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    assert {value.device.type for value in resting} == {"cpu"}
    [expected], [actual] = saved.train(second, [1e-3]), restored.train(second, [1e-3])
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
    assert actual.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
