"""Degrees and lengths that the sizes of a model do not allow are problems of its plan."""

from dataclasses import replace

import pytest

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.catalog.models import MODELS, find
from qwen35_trainer.manifest import parse_spec
from qwen35_trainer.planning.memory_plan import device_misfits, memory_plan
from qwen35_trainer.planning.model_limits import limit_problems
from tests.planning.test_resource_plan import LARGE

ROLLOUT = {"mode": "FullyAsync", "rewards": [{"type": "ExactMatch"}]}


def spec_of(**sections):
    spec, problems = parse_spec(LARGE | ROLLOUT | sections)
    assert spec is not None, problems
    return spec


def problems_of(model, **sections):
    spec = spec_of(**sections)
    return {problem.path: problem for problem in limit_problems(MODELS[f"Qwen/{model}"], spec)}


@pytest.mark.parametrize(
    ("model", "devices", "sizes", "fix"),
    [
        ("Qwen3.5-27B", 16, "num_attention_heads 24", "Use 8,"),
        ("Qwen3.5-4B", 32, "num_attention_heads 16, linear_num_key_heads 16", "Use 16,"),
        ("Qwen3.5-35B-A3B", 32, "num_attention_heads 16, linear_num_key_heads 16", "Use 16,"),
        ("Qwen3-30B-A3B", 64, "num_attention_heads 32", "Use 32,"),
    ],
)
def test_a_replica_has_a_number_of_devices_that_divides_the_heads(model, devices, sizes, fix):
    rollout = {"engine": "VLLM", "nodes": 8, "tensorParallel": devices}
    [(path, problem)] = problems_of(model, rollout=rollout).items()
    assert path == "spec.rollout.tensorParallel"
    assert problem.message == f"vLLM cannot divide {sizes} of this model among {devices} devices."
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("model", "degrees", "field", "message", "fix"),
    [
        ("Qwen3.5-27B", {"tensor": 8}, "tensor", "8 does not divide num_key_value_heads 4", "Use 4,"),
        ("Qwen3.5-35B-A3B", {"tensor": 4}, "tensor", "4 does not divide num_key_value_heads 2", "Use 2,"),
        (
            "Qwen3.5-27B",
            {"expert": 8},
            "expert",
            "8 devices divide the experts of a layer, and the model is dense",
            "Set it to 1.",
        ),
        ("Qwen3-30B-A3B", {"expert": 256}, "expert", "256 devices do not divide the 128 experts", "Use 128."),
        (
            "Qwen3.5-35B-A3B",
            {"expertTensor": 1024},
            "expertTensor",
            "1024 does not divide moe_intermediate_size 512",
            "Use 512,",
        ),
    ],
)
def test_ranks_of_megatron_have_whole_heads_experts_and_channels(model, degrees, field, message, fix):
    train = {"engine": "Megatron", "nodes": 128, "parallelism": degrees}
    sections = {"mode": "SFT", "rewards": [], "train": train | {"batch": {"dynamicMicroBatches": True}}}
    [(path, problem)] = problems_of(model, **sections).items()
    assert path == f"spec.train.parallelism.{field}"
    assert problem.message.startswith(message)
    assert problem.fix.startswith(fix)


def test_context_parallel_ranks_of_fsdp_have_whole_heads():
    problems = problems_of("Qwen3.5-27B", train={"nodes": 2, "parallelism": {"context": 16}})
    assert "16 does not divide num_attention_heads 24" in problems["spec.train.parallelism.context"].message
    assert problems_of("Qwen3.5-27B", train={"nodes": 2, "parallelism": {"context": 8}}) == {}


def fixes(model, device, **sections):
    spec = spec_of(**sections)
    return {
        problem.path: problem.fix
        for problem in device_misfits(memory_plan(MODELS[f"Qwen/{model}"], spec, device), spec)
    }


def test_no_fix_raises_a_degree_beyond_those_that_divide_the_model():
    """27B has 4 heads of keys and values and 24 of queries: at most 4 tensor ranks, and 8 devices of a replica."""
    train = {"engine": "Megatron", "nodes": 1, "offload": {"optimizer": True}, "parallelism": {"tensor": 4}}
    vllm = {"engine": "VLLM", "nodes": 4, "memoryFraction": 0.01}
    for devices, fix in (
        (2, "Raise rollout.tensorParallel to 4 or more, or rollout."),
        (8, "Raise rollout.memoryFraction, or"),
    ):
        rollout = vllm | {"tensorParallel": devices}
        proposed = fixes("Qwen3.5-27B", "H100", train=train, rollout=rollout, data=lengths(8192, 65_536))
        assert proposed["spec.rollout"].startswith(fix)
        assert "raise train.parallelism.pipeline" in proposed["spec.train"].lower()
        assert "tensor" not in proposed["spec.train"]
        assert "expert" not in proposed["spec.train"]


def lengths(prompt, response):
    return LARGE["data"] | {"maxPromptTokens": prompt, "maxResponseTokens": response}


def test_a_prompt_and_its_response_have_at_most_the_positions_of_the_model():
    vllm = {"rollout": {"engine": "VLLM", "tensorParallel": 2}}
    assert problems_of("Qwen3-30B-A3B", data=lengths(8192, 32_768), **vllm) == {}
    [(path, problem)] = problems_of("Qwen3-30B-A3B", data=lengths(8192, 32_769), **vllm).items()
    assert path == "spec.data.maxResponseTokens"
    assert "above the 40960 positions of the model" in problem.message
    assert problem.fix == "Lower it to at most 32768."
    assert problems_of("Qwen3.5-35B-A3B", data=lengths(8192, 131_072), **vllm) == {}


def test_a_longer_context_is_planned_where_vllm_accepts_it():
    shape, data = replace(MODELS["Qwen/Qwen3-30B-A3B"], positions=1000), lengths(512, 512)
    forced = {"pods": {"env": [{"name": "VLLM_ALLOW_LONG_MAX_MODEL_LEN", "value": "1"}]}}
    for accepted in ({"rollout": {"engine": "Torch"}}, {"rollout": {"engine": "VLLM"}} | forced):
        assert [*limit_problems(shape, spec_of(data=data, **accepted))] == []
    assert len([*limit_problems(shape, spec_of(data=data, rollout={"engine": "VLLM"}))]) == 1


@pytest.mark.parametrize(
    ("rotary", "positions"),
    [
        ({}, 1000),
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "llama3", "factor": 8.0}, 1000),
    ],
)
def test_positions_are_those_that_a_config_json_allows(rotary, positions):
    text = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 16, "vocab_size": 100, "intermediate_size": 128}
    assert ModelSizes.of_config(text).positions is None
    text |= {"max_position_embeddings": 1000, "rope_parameters": rotary}
    assert ModelSizes.of_config(text).positions == positions
    assert ModelSizes.of_config({"text_config": text}).positions == positions


def test_positions_of_a_variant_of_a_published_model_are_not_known():
    variant = find("Qwen/Qwen3-30B-A3B-Instruct-2507")
    assert variant == replace(MODELS["Qwen/Qwen3-30B-A3B"], positions=None)
    assert find("qwen/qwen3-30b-a3b") == MODELS["Qwen/Qwen3-30B-A3B"]
