"""Valid manifests that this release cannot run: the messages about them, from the function and from the commands that call it."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from qwen35_trainer.commands import app
from qwen35_trainer.manifest import cannot_run, load_manifest, parse_manifest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
EIGHT = {"accelerator.devicesPerNode": 8, "train.batch.promptsPerUpdate": 8}
VLLM = {"rollout.engine": "VLLM", "model.source": {"random": {"headDim": 32, "linearHeadDim": 64}}}
FOUR_HEADS = {
    "model.source": {"random": {"headDim": 32, "linearHeadDim": 64, "linearKeyHeads": 4, "linearValueHeads": 4}}
}
LANE = {"nodes": 1, "tensorParallel": 2, "afterTokens": 9}
MEGATRON = {"train.engine": "Megatron"}
BEYOND_MEGATRON = MEGATRON | {"train.batch.removePadding": True}
BEYOND = {
    "a split replica": ({"rollout.tensorParallel": 2}, ["spec.rollout.tensorParallel"]),
    "a vLLM replica over nodes that takes turns with the trainer": (
        VLLM
        | FOUR_HEADS
        | {"accelerator.devicesPerNode": 1, "mode": "Colocated", "rollout.nodes": 2, "train.nodes": 2}
        | {"rollout.tensorParallel": 2},
        ["spec.rollout.tensorParallel"],
    ),
    "adapters on vLLM replicas over nodes": (
        VLLM
        | FOUR_HEADS
        | {"accelerator.devicesPerNode": 1, "rollout.nodes": 2, "rollout.tensorParallel": 2}
        | {"train.lora": {"rank": 4}, "train.nodes": 1},
        ["spec.rollout.tensorParallel"],
    ),
    "vLLM replicas over nodes of several devices on the CPU": (
        VLLM | FOUR_HEADS | {"accelerator.devicesPerNode": 2, "rollout.nodes": 2, "rollout.tensorParallel": 4},
        ["spec.rollout.tensorParallel"],
    ),
    "vLLM replicas of more devices than heads": (
        EIGHT
        | VLLM
        | {
            "rollout.nodes": 2,
            "rollout.tensorParallel": 4,
            "rollout.stragglerLane": LANE | {"tensorParallel": 8},
        },
        ["spec.rollout.tensorParallel", "spec.rollout.stragglerLane.tensorParallel"],
    ),
    "vLLM with adapters of a large rank": (VLLM | {"train.lora": {"rank": 513}}, ["spec.train.lora.rank"]),
    "vLLM with adapters and experts on the CPU": (
        VLLM
        | {
            "train.lora": {"rank": 4},
            "model.source": {"random": {"headDim": 32, "linearHeadDim": 64, "experts": 4, "expertsPerToken": 2}},
        },
        ["spec.train.lora"],
    ),
    "vLLM on Ascend with router replay": (
        {
            "accelerator.profile": "Ascend",
            "model.source": {"path": "folder"},
            "rollout.engine": "VLLM",
            "train.router.replay": True,
        },
        ["spec.train.router.replay"],
    ),
    "vLLM with offloaded keys and router replay": (
        VLLM | {"rollout.vllm": {"extraArguments": {"kv_offloading_size": 10}}, "train.router.replay": True},
        ["spec.rollout.vllm.extraArguments.kv_offloading_size"],
    ),
    "vLLM on Ascend with a random model": (VLLM | {"accelerator.profile": "Ascend"}, ["spec.model.source.random"]),
    "vLLM on Ascend with a rounded cache": (
        {
            "accelerator.profile": "Ascend",
            "model.source": {"path": "folder"},
            "rollout.engine": "VLLM",
            "rollout.vllm": {"kvCachePrecision": "FP8"},
        },
        ["spec.rollout.vllm.kvCachePrecision"],
    ),
    "vLLM with a rounded cache on the CPU": (
        VLLM | {"rollout.vllm": {"kvCachePrecision": "FP8"}},
        ["spec.rollout.vllm.kvCachePrecision"],
    ),
    "vLLM on the CPU with small heads": (
        {"rollout.engine": "VLLM"},
        ["spec.model.source.random.headDim", "spec.model.source.random.linearHeadDim"],
    ),
    "Megatron with context parallelism": (
        MEGATRON | EIGHT | {"train.parallelism.context": 2},
        ["spec.train.parallelism.context"],
    ),
    "Megatron with packed rows": (BEYOND_MEGATRON, ["spec.train.batch.removePadding"]),
    "Megatron with Muon": (MEGATRON | {"train.optimizer.type": "Muon"}, ["spec.train.optimizer.type"]),
    "Megatron with one expert per token": (
        MEGATRON | {"model.source": {"random": {"experts": 4, "expertsPerToken": 1}}},
        ["spec.model.source.random.expertsPerToken"],
    ),
    "Megatron with frozen parts": (MEGATRON | {"train.freeze": ["Vision"]}, ["spec.train.freeze"]),
    "Megatron with adapters": (MEGATRON | {"train.lora": {"rank": 4}}, ["spec.train.lora"]),
    "a prediction head in reinforcement learning": (
        MEGATRON | {"train.multiTokenPrediction": {}, "model.source": {"path": "/models/qwen"}},
        ["spec.train.multiTokenPrediction"],
    ),
    "a prediction head with FSDP, and of a random model": (
        {"train.multiTokenPrediction": {"detached": True}},
        ["spec.train.multiTokenPrediction"] * 3,
    ),
    "FSDP with tensor parallelism": (EIGHT | {"train.parallelism.tensor": 2}, ["spec.train.parallelism.tensor"]),
    "FSDP with stages": (EIGHT | {"train.parallelism.pipeline": 2}, ["spec.train.parallelism.pipeline"]),
    "FSDP with virtual stages": (
        EIGHT | {"train.parallelism": {"pipeline": 2, "virtualPipeline": 2}},
        ["spec.train.parallelism.pipeline", "spec.train.parallelism.virtualPipeline"],
    ),
    "FSDP with split experts": (
        EIGHT | {"train.parallelism.expertTensor": 2},
        ["spec.train.parallelism.expertTensor"],
    ),
    "GAE": ({"algorithm.advantage": "GAE"}, ["spec.algorithm.advantage"]),
    "all together": (
        BEYOND_MEGATRON | {"rollout.tensorParallel": 2, "algorithm.advantage": "GAE"},
        ["spec.rollout.tensorParallel", "spec.train.batch.removePadding", "spec.algorithm.advantage"],
    ),
}


@pytest.fixture(params=BEYOND.values(), ids=BEYOND)
def beyond(request, written):
    """The file of a manifest, and the fields that no release can run yet."""
    changes, paths = request.param
    return written(changes), paths


def test_every_field_that_is_in_the_way_is_named_with_its_fix(beyond):
    file, paths = beyond
    problems = cannot_run(load_manifest(file).spec)
    assert [problem.path for problem in problems] == paths
    assert all(problem.message and problem.fix for problem in problems)


def test_a_manifest_without_such_fields_can_be_run(document):
    """The default engines are those that run."""
    manifest = document()
    del manifest["spec"]["rollout"]["engine"]
    spec = parse_manifest(manifest).spec
    assert (spec.rollout.engine, spec.train.engine) == ("Torch", "FSDP")
    assert cannot_run(spec) == []


@pytest.mark.parametrize("profile", ["CPU", "NVIDIA"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("train", [{}, {"train.lora": {"rank": 512}}])
def test_vllm_can_be_run(document, profile, devices, train):
    changes = {"accelerator.profile": profile, "rollout.tensorParallel": devices} | train
    assert cannot_run(parse_manifest(document(VLLM | changes)).spec) == []


@pytest.mark.parametrize("profile", ["CPU", "NVIDIA"])
def test_vllm_can_be_run_with_a_lane_of_replicas_that_are_a_node(document, profile):
    changes = {"accelerator.profile": profile, "rollout.nodes": 2, "rollout.stragglerLane": LANE}
    assert cannot_run(parse_manifest(document(VLLM | changes)).spec) == []


def test_the_message_about_heads_names_them_and_a_number_of_devices_that_fits(document):
    shape = {"random": {"headDim": 32, "linearHeadDim": 64, "attentionHeads": 6, "keyValueHeads": 2}}
    changes = {"accelerator.devicesPerNode": 4, "rollout.tensorParallel": 4, "model.source": shape}
    [problem] = cannot_run(parse_manifest(document(VLLM | changes | {"train.batch.promptsPerUpdate": 4})).spec)
    shown = "attentionHeads 6, linearKeyHeads 2, linearValueHeads 2"
    assert problem.message == f"vLLM cannot divide {shown} of this model among 4 devices."
    assert problem.fix == "Use 2, or a model with other sizes."


def test_an_advantage_that_supervised_training_does_not_use_is_in_nobodys_way(document, removed):
    changes = {"mode": "SFT", "rollout": removed, "rewards": removed, "algorithm": {"advantage": "GAE"}}
    spec = parse_manifest(document(changes | {"train.batch.microBatchSequences": 2})).spec
    assert cannot_run(spec) == []


def invoke(*arguments: object):
    with patch.dict(os.environ):  # `run` sets variables for its processes
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", ["validate", "render", "plan"])
def test_a_command_says_so_with_exit_code_3(command, written):
    file = written(BEYOND_MEGATRON | {"async": {"stalenessThreshold": 1.0, "maxVersionLag": 2}})
    result = invoke(command, file)
    assert result.exit_code == 3, result.output
    output = result.stdout if command == "validate" else result.stderr
    assert (
        f"{file}: valid, but this release cannot run it:\n  spec.train.batch.removePadding: the Megatron engine"
        in output
    )
    assert "set train.engine to FSDP." in output


def test_a_command_that_prints_something_still_prints_it(written):
    assert "kind: RayJob" in invoke("render", written(BEYOND_MEGATRON)).stdout


def test_a_run_is_refused(written, tmp_path):
    result = invoke("run", written(BEYOND_MEGATRON), "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "spec.train.batch.removePadding: the Megatron engine of this release pads sequences." in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_wrong_manifest_among_others_counts_more(written, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: Qwen35Training\n")
    result = invoke("validate", written(BEYOND_MEGATRON), wrong)
    assert result.exit_code == 2
    assert "but this release cannot run it" in result.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_says_in_its_first_line_whether_it_can_be_run(example):
    first = example.read_text().splitlines()[0]
    beyond = cannot_run(load_manifest(example).spec)
    assert first.startswith("# This release cannot run it yet: ") == bool(beyond)
    assert invoke("validate", example).exit_code == (3 if beyond else 0)
