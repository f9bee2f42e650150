"""The shards that a rank publishes: their types, and that they are the live weights, of which nothing is copied."""

import pytest
import torch

from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.weights.adapters import SCALE

pytestmark = pytest.mark.usefixtures("alone")
FLOAT32 = {"linear_attn.A_log", "linear_attn.norm.weight"}


@pytest.mark.parametrize(
    ("engine", "precision", "expected"),
    [
        ("Torch", "FP32", torch.float32),
        ("Torch", "BF16", torch.bfloat16),
        ("VLLM", "FP32", torch.bfloat16),
        ("VLLM", "BF16", torch.bfloat16),
    ],
)
def test_weights_are_published_in_the_type_that_replicas_compute_in(make_model, make_spec, engine, precision, expected):
    spec = make_spec({"rollout.engine": engine, "model.precision": precision})
    shards = FSDPEngine(Origin(make_model), spec, torch.device("cpu")).shards()
    kept = {shard.name for shard in shards if shard.name.endswith(tuple(FLOAT32))}
    assert kept
    assert {shard.dtype for shard in shards if shard.name in kept} == {torch.float32}
    assert {shard.dtype for shard in shards if shard.name not in kept} == {expected}


def test_the_only_rank_publishes_every_value_and_copies_none(make_model, make_spec):
    engine = FSDPEngine(Origin(make_model), make_spec(), torch.device("cpu"))
    parameters = dict(engine._model.named_parameters())
    shards = engine.shards()
    assert [shard.name for shard in shards] == list(parameters)
    for shard in shards:
        assert shard.shape == tuple(parameters[shard.name].shape)
        assert (shard.start, shard.values.numel()) == (0, parameters[shard.name].numel())
        assert shard.values.data_ptr() == parameters[shard.name].to_local().data_ptr()


def test_adapters_for_vllm_are_rounded_after_they_are_scaled(make_model, make_spec):
    spec = make_spec({"rollout.engine": "VLLM", "model.precision": "FP32", "train.lora": {"rank": 4}})
    shards = FSDPEngine(Origin(make_model), spec, torch.device("cpu")).shards()
    assert {shard.dtype for shard in shards if shard.name != SCALE} == {torch.float32}
