"""What the vision tower of a published model needs, next to the layers of text."""

from typing import Any

from qwen35_trainer.catalog.models import find
from qwen35_trainer.manifest import TrainingSpec, parse_spec
from qwen35_trainer.planning import fsdp_memory
from qwen35_trainer.planning.micro_batch_size import MicroBatchSize
from qwen35_trainer.planning.tower_activations import TowerActivations
from tests.manifest.conftest import SMALL

SHAPE = find("Qwen/Qwen3.5-27B")


def spec_of(*, prompt: int = 8192, supervised: bool = False, **train: Any) -> TrainingSpec:
    sections = {"mode": "SFT", "rewards": []} if supervised else {"rewards": SMALL["spec"]["rewards"], "rollout": {}}
    changes = {
        "accelerator": {"profile": "NVIDIA", "devicesPerNode": 8},
        "model": {"name": "Qwen/Qwen3.5-27B", "source": {"path": "none"}},
        "data": SMALL["spec"]["data"] | {"maxPromptTokens": prompt, "maxResponseTokens": 512},
        "train": {"nodes": 2, "activationCheckpointing": True} | train,
    }
    spec, problems = parse_spec(sections | changes)
    assert spec is not None, problems
    return spec


def of(spec: TrainingSpec, *, pictures: bool = True) -> TowerActivations:
    assert SHAPE is not None
    return TowerActivations.of(SHAPE, spec, MicroBatchSize.of(spec), pictures=pictures)


def test_without_pictures_or_a_tower_there_is_nothing() -> None:
    assert of(spec_of(), pictures=False) == TowerActivations()


def test_a_tower_that_does_not_train_keeps_the_patches_only() -> None:
    trains, frozen, adapters = (of(spec_of(**train)) for train in ({}, {"freeze": ["Vision"]}, {"lora": {"rank": 8}}))
    assert frozen == adapters
    assert frozen.kept < 0.1 * trains.kept
    assert frozen.block_input == 0


def test_in_the_backward_pass_of_the_tower_the_gradients_of_the_layers_exist() -> None:
    """Also if an update has one micro-batch, which begins without gradients."""
    assert SHAPE is not None
    cut = {"parallelism": {"context": 8}, "batch": {"promptsPerUpdate": 4, "microBatchSequences": 8}}
    memory = fsdp_memory.rank_memory(SHAPE, spec_of(**cut), "Fused", pictures=True)
    assert memory.peak == "backward pass of the vision tower"
    assert memory.device.gradients > 6 * 2**30


def test_offloaded_inputs_of_the_blocks_are_in_the_host() -> None:
    assert SHAPE is not None
    stays, leaves = (
        fsdp_memory.rank_memory(SHAPE, spec_of(offload={"activations": offloads}), "Fused", pictures=True)
        for offloads in (False, True)
    )
    text = fsdp_memory.rank_memory(SHAPE, spec_of(offload={"activations": True}), "Fused", pictures=False)
    inputs = 27 * of(spec_of()).block_input
    assert leaves.host - text.host >= inputs
    assert stays.device.total - leaves.device.total >= 0.9 * inputs


def test_only_supervised_examples_may_show_pictures_after_the_prompt() -> None:
    size = MicroBatchSize.of(spec_of(prompt=1000))
    assert size.pictured < size.tokens
    supervised = MicroBatchSize.of(spec_of(prompt=1000, supervised=True))
    assert supervised.pictured == supervised.tokens
