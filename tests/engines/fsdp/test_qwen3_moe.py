"""What trains of a mixture of experts of Qwen3, whose linear layers are those of full attention only."""

import pytest
import torch

from qwen35_trainer.engines.fsdp import lora
from qwen35_trainer.engines.fsdp.engine import FSDPEngine
from qwen35_trainer.engines.fsdp.muon import Muon
from qwen35_trainer.engines.fsdp.optimizer import Optimizers
from qwen35_trainer.engines.fsdp.sharding import layers
from qwen35_trainer.engines.origin import Origin
from qwen35_trainer.manifest import LoRASpec, OptimizerSpec
from qwen35_trainer.rollout.torch import TorchEngine
from tests.distributed.masters import masters
from tests.engines.fsdp.test_freezing import CPU, changed
from tests.models import qwen3_moe
from tests.publications import published_by, received
from tests.rollout.loading import load

ATTENTION = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
SPARING = {"train.activationCheckpointing": True, "train.offload": {"parameters": True, "activations": True}}


@pytest.mark.usefixtures("alone")
def test_frozen_parts_stay_as_they_are_and_the_rest_trains_in_bfloat16(make_spec, make_batch) -> None:
    settings = {"train.freeze": ["Embeddings", "Router"], "model.precision": "BF16"} | SPARING
    engine = FSDPEngine(Origin(qwen3_moe.model), make_spec(settings), CPU)
    moved, names = changed(engine, make_batch()), masters(engine).keys()
    frozen = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    assert names - moved == {name for name in names if name.endswith(frozen)}
    assert len(names - moved) == 2 + 4


@pytest.mark.usefixtures("alone")
def test_published_adapters_of_the_default_targets_make_the_rollout_model_the_trainers_own(
    make_spec, make_batch, log_probs_of
) -> None:
    engine = FSDPEngine(Origin(qwen3_moe.model), make_spec({"train.lora": {"rank": 3, "alpha": 6.0}}), CPU)
    rollout, merged, batch = qwen3_moe.model(), qwen3_moe.model(), make_batch()
    generating = TorchEngine(rollout, end_token=2, slots=2, max_length=32, seed=0)
    moved = changed(engine, batch)
    assert moved == {name for name in masters(engine) if name.endswith(ATTENTION)}
    load(generating, received(published_by(engine).items(), 1), 1)
    merged.load_state_dict(masters(engine))
    with torch.no_grad():
        here, there = (torch.cat(log_probs_of(model, batch)) for model in (rollout, merged))
    assert (here - there).abs().max() <= 5e-5  # the sums have another order


def test_adapters_muon_and_units_are_found_by_the_names_of_this_decoder() -> None:
    model = qwen3_moe.model()
    assert layers(model) == [*(layer.mlp.experts for layer in model.model.layers), *model.model.layers]
    parts = Optimizers.of(model, OptimizerSpec(type="Muon")).parts
    [muon] = [part for part in parts if isinstance(part, Muon)]
    chosen = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    assert names == {name for name, _ in model.named_parameters() if name.endswith((*ATTENTION, *stacks))}
    lora.add(model, LoRASpec())
    assert sum(name.endswith(lora.DOWN) for name, _ in model.named_parameters()) == 4 * 4
    with pytest.raises(
        ValueError, match="no linear layer is called gate_proj; the decoder layers have k_proj, o_proj,"
    ):
        lora.add(qwen3_moe.model(), LoRASpec(targets=("q_proj", "gate_proj")))
