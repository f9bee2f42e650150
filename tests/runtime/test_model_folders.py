"""Model folders that a run cannot use, refused from their config.json before anything starts."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from qwen35_trainer.catalog.model_sizes import ModelSizes
from qwen35_trainer.data.data_errors import DataError
from qwen35_trainer.data.tokenizer import character_tokenizer
from qwen35_trainer.manifest import RandomModelSpec, RolloutSpec, StragglerLaneSpec, TrainingSpec
from qwen35_trainer.manifest.model import RandomVisionSpec
from qwen35_trainer.manifest.vllm_split import DividedSizes
from qwen35_trainer.runtime.preflight import problems_of
from qwen35_trainer.runtime.prepare import check_end_of_turn, check_vocabulary, stop_tokens

TEXT = {"head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "vocab_size": 100}


def spec(engine: str, train: dict[str, Any] | None = None, profile: str = "CPU") -> TrainingSpec:
    return TrainingSpec.model_validate(
        {
            "accelerator": {"profile": profile},
            "model": {"name": "tiny", "source": {"path": "model"}},
            "data": {"train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 8}}]},
            "rewards": [{"name": "right", "type": "Gym"}],
            "rollout": {"engine": engine},
            "train": {"updates": 1} | (train or {}),
        }
    )


def problems(
    tmp_path: Path,
    config: dict[str, Any],
    engine: str = "VLLM",
    train: dict[str, Any] | None = None,
    profile: str = "CPU",
) -> list[str]:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5"} | config))
    (folder / "tokenizer_config.json").write_text("{}")
    write_weights(folder / "model.safetensors")
    return [f"{problem.path}: {problem.message}" for problem in problems_of(spec(engine, train, profile), tmp_path)]


def write_weights(file: Path, *names: str) -> None:
    save_file({name: np.zeros(3, np.float32) for name in names}, file)


def test_a_folder_that_fits_has_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, {"text_config": TEXT}) == []


@pytest.mark.parametrize("engine", ["VLLM", "Torch"])
def test_quantised_weights_are_refused_with_their_method(tmp_path: Path, engine: str) -> None:
    [problem] = problems(tmp_path, {"text_config": TEXT, "quantization_config": {"quant_method": "fp8"}}, engine)
    assert problem.startswith("spec.model.source.path: its weights are quantised (fp8)")


def test_heads_without_kernels_are_named_with_the_sizes_that_have_some(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"text_config": TEXT | {"linear_key_head_dim": 16}})
    assert problem.endswith("linear_key_head_dim in config.json is 16, and vLLM's CPU kernels have 64, 128.")


def test_the_torch_engine_takes_heads_of_any_size(tmp_path: Path) -> None:
    assert problems(tmp_path, {"text_config": TEXT | {"head_dim": 8}}, "Torch") == []


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        TEXT | {"rope_parameters": {"rope_theta": 1e7}},
        TEXT | {"rope_parameters": {"mrope_section": []}},
        TEXT | {"rope_parameters": "default"},
    ],
    ids=str,
)
def test_positions_without_sections_are_refused_on_ascend_only(tmp_path: Path, text: dict[str, Any]) -> None:
    [problem] = problems(tmp_path, {"text_config": text}, profile="Ascend")
    place, message = "spec.model.source.path", "rope_parameters in config.json has no mrope_section"
    assert problem.startswith(f"{place}: {message}")
    for number, (engine, profile) in enumerate([("Torch", "Ascend"), ("VLLM", "NVIDIA"), ("VLLM", "CPU")]):
        other = tmp_path / str(number)
        other.mkdir()
        assert problems(other, {"text_config": text}, engine, profile=profile) == []


def test_a_published_folder_has_the_sections_that_ascend_needs(tmp_path: Path) -> None:
    positions = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_theta": 10_000_000}
    assert problems(tmp_path, {"text_config": TEXT | {"rope_parameters": positions}}, profile="Ascend") == []


QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 12_288,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000.0,
}
"""Sizes of Qwen3-235B-A22B, as in its config.json."""


@pytest.mark.parametrize("profile", ["CPU", "NVIDIA", "Ascend"])
def test_a_published_mixture_of_experts_of_qwen3_has_no_problem(tmp_path: Path, profile: str) -> None:
    assert problems(tmp_path, QWEN3, profile=profile) == []


@pytest.mark.parametrize(("engine", "expected"), [("VLLM", 1), ("Torch", 0)])
def test_a_context_longer_than_the_positions_is_refused_before_vllm_starts(
    tmp_path: Path, engine: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = problems(tmp_path, {"text_config": TEXT | {"max_position_embeddings": 1000}}, engine)
    assert [problem.partition(":")[0] for problem in refused] == ["spec.data.maxResponseTokens"] * expected
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert problems_of(spec(engine), tmp_path) == []


EXPERTS = {"model_type": "qwen3_5_moe", "text_config": TEXT}


@pytest.mark.parametrize("config", [EXPERTS, QWEN3], ids=["Qwen3.5", "Qwen3"])
def test_experts_with_adapters_need_another_engine_on_the_cpu(tmp_path: Path, config: dict[str, Any]) -> None:
    [problem] = problems(tmp_path, config, train={"lora": {}})
    assert problem.startswith("spec.train.lora: with adapters, vLLM computes experts by Triton's kernels")


@pytest.mark.parametrize(("engine", "train"), [("Torch", {"lora": {}}), ("VLLM", {})])
def test_experts_alone_have_no_problem(tmp_path: Path, engine: str, train: dict[str, Any]) -> None:
    assert problems(tmp_path, EXPERTS, engine, train) == []


SIZES = TEXT | {"hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2}
SIZES |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "vocab_size": 248_320, "head_dim": 256}
SIZES |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
OF_EXPERTS = SIZES | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
OF_EXPERTS |= {"shared_expert_intermediate_size": 512}
"""Sizes of Qwen3.5-35B-A3B, as in its config.json."""
DENSE = SIZES | {"intermediate_size": 6144}


@pytest.mark.parametrize("engine", ["FSDP", "Megatron"])
@pytest.mark.parametrize(
    ("config", "expert", "message"),
    [
        ({"text_config": OF_EXPERTS}, 8, None),
        ({"text_config": OF_EXPERTS}, 24, "24 devices do not divide the 256 experts of a layer."),
        (DENSE, 24, "24 devices divide the experts of a layer, and the model is dense."),
        (DENSE, 1, None),
    ],
    ids=["8 of 256 experts", "24 of 256 experts", "24 of a dense model", "1 of a dense model"],
)
def test_experts_that_devices_do_not_divide_are_refused(
    tmp_path: Path, engine: str, config: dict[str, Any], expert: int, message: str | None
) -> None:
    expected = [] if message is None else [f"spec.train.parallelism.expert: {message}"]
    assert problems(tmp_path, config, train={"engine": engine, "parallelism": {"expert": expert}}) == expected


@pytest.mark.parametrize(
    ("config", "degrees", "path", "message"),
    [
        (OF_EXPERTS, {"tensor": 4}, "tensor", "4 does not divide num_key_value_heads 2 of this model."),
        (OF_EXPERTS, {"expertTensor": 1024}, "expertTensor", "1024 does not divide moe_intermediate_size 512"),
        (DENSE, {"pipeline": 41}, "pipeline", "41 stages, and the model has 40 layers."),
        (
            DENSE,
            {"pipeline": 8, "virtualPipeline": 3},
            "virtualPipeline",
            "3 virtual stages of each of 8 pipeline stages cannot divide 40 layers evenly.",
        ),
        (
            DENSE | {"tie_word_embeddings": True},
            {"pipeline": 2},
            "pipeline",
            "2 stages, and the output layer of this model is its embedding",
        ),
    ],
)
def test_ranks_of_megatron_that_do_not_divide_a_folders_model_are_refused_before_ray_starts(
    tmp_path: Path, config: dict[str, Any], degrees: dict[str, int], path: str, message: str
) -> None:
    [problem] = problems(tmp_path, {"text_config": config}, train={"engine": "Megatron", "parallelism": degrees})
    assert problem.startswith(f"spec.train.parallelism.{path}: {message}")


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_attention_heads": "16"},
        {"num_hidden_layers": None},
        {"num_key_value_heads": 2.5},
        {"num_experts": [8]},
        {"intermediate_size": []},
    ],
    ids=str,
)
def test_sizes_that_are_not_whole_numbers_end_no_check(tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Checks of degrees leave them to the engine, which reads the file by transformers' rules."""
    train = {"engine": "Megatron", "parallelism": {"tensor": 4}}
    listed = problems(tmp_path, {"text_config": DENSE | sizes}, "Torch", train)
    assert not [problem for problem in listed if "parallelism" in problem]
    with pytest.raises((TypeError, KeyError)):
        ModelSizes.of_config({"text_config": DENSE | sizes})


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ('{"eos_token_id": [5, 2, 4, 1000]}', (2, 5)),  # 4 is the tokenizer's end token, 1000 no token of it
        ('{"eos_token_id": 2}', (2,)),
        ('{"eos_token_id": [7]}', ()),  # an ordinary token
        ('{"eos_token_id": null}', ()),
        ('{"do_sample": true}', ()),
        ("[]", ()),
        ('{"eos_token_id": [[2]]}', ()),
        ("no JSON", ()),
        (None, ()),
    ],
)
def test_a_response_also_ends_where_it_ends_when_the_published_model_is_served(
    tmp_path: Path, contents: str | None, expected: tuple[int, ...]
) -> None:
    """Qwen's instruct models end at <|im_end|> and at <|endoftext|>, and their tokenizers have one end token."""
    tokens = {number: SimpleNamespace(special=number < 7) for number in range(1, 10)}
    tokenizer: Any = SimpleNamespace(added_tokens_decoder=tokens, eos_token_id=4)
    problems(tmp_path, {"text_config": TEXT})
    if contents is not None:
        (tmp_path / "model" / "generation_config.json").write_text(contents)
    assert stop_tokens(spec("VLLM"), tmp_path, tokenizer) == expected


def test_a_template_that_ends_turns_with_another_token_than_the_tokenizer_is_refused_with_both_tokens() -> None:
    """Folders of base models have such tokenizers."""
    tokenizer = character_tokenizer("a")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<|im_end|>\n{% endfor %}"
    check_end_of_turn(spec("Torch"), tokenizer, ())
    tokenizer.eos_token = "<|endoftext|>"
    supervised = spec("Torch").model_copy(update={"mode": "SFT"})
    for each in (spec("Torch"), supervised):
        check_end_of_turn(each, tokenizer, (2,))  # generation_config.json has <|im_end|> too
    with pytest.raises(DataError, match="a response would continue after its turn"):
        check_end_of_turn(supervised, tokenizer, ())
    with pytest.raises(DataError) as raised:
        check_end_of_turn(spec("Torch"), tokenizer, ())
    assert raised.value.problems == (
        "the chat template ends an assistant's turn with <|im_end|>, and the tokenizer's end token is <|endoftext|>: a "
        "response would continue after its turn. Add 2 (<|im_end|>) to eos_token_id in generation_config.json of model, or let the template end an assistant's turn with <|endoftext|> "
        "(data.chatTemplate.file).",
    )
    tokenizer.chat_template = None
    check_end_of_turn(spec("Torch"), tokenizer, ())


def test_a_tokenizer_with_more_tokens_than_the_model_has_embeddings_is_refused(tmp_path: Path) -> None:
    problems(tmp_path, {"text_config": TEXT})
    check_vocabulary(spec("VLLM"), tmp_path, 100)
    with pytest.raises(DataError, match="the tokenizer of model has 101 tokens, and the model has embeddings for 100 "):
        check_vocabulary(spec("VLLM"), tmp_path, 101)


HEADS = {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 24}


def test_a_model_that_vllm_cannot_divide_is_refused_with_the_sizes_that_are_in_the_way(tmp_path: Path) -> None:
    problems(tmp_path, {"text_config": TEXT | HEADS | {"intermediate_size": 128}})
    lane = StragglerLaneSpec(nodes=1, tensorParallel=16, afterTokens=9)
    rollout = RolloutSpec(engine="VLLM", nodes=2, tensorParallel=8, stragglerLane=lane)
    [problem] = problems_of(spec("VLLM").model_copy(update={"rollout": rollout}), tmp_path)
    assert problem.path == "spec.rollout.stragglerLane.tensorParallel"
    assert problem.message == "vLLM cannot divide linear_num_value_heads 24 of this model among 16 devices."
    assert problem.fix == "Use 8, or a model with other sizes."


PUBLISHED = {
    "0.8B": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    }
    | {"intermediate_size": 3584, "vocab_size": 248_320},
    "27B": {
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
    }
    | {"intermediate_size": 17_408, "vocab_size": 248_320},
    "35B-A3B": {"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_key_heads": 16}
    | {"linear_num_value_heads": 32, "num_experts": 256, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "vocab_size": 248_320},
    "397B-A17B": {"num_attention_heads": 32, "num_key_value_heads": 2, "linear_num_key_heads": 16}
    | {"linear_num_value_heads": 64, "num_experts": 512, "moe_intermediate_size": 1024}
    | {"shared_expert_intermediate_size": 1024, "vocab_size": 248_320},
    "Qwen3-30B-A3B": {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128}
    | {"intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151_936},
    "Qwen3-235B-A22B": {name: size for name, size in QWEN3.items() if isinstance(size, int)},
}
"""Sizes of published models, as in their config.json."""


@pytest.mark.parametrize("sizes", PUBLISHED.values(), ids=PUBLISHED)
def test_vllm_can_divide_published_models_among_the_devices_of_a_node(sizes: dict[str, int]) -> None:
    assert [size for size in (1, 2, 4, 8) if DividedSizes.of_configuration(sizes).indivisible(size)] == []


MIXTURE = PUBLISHED["35B-A3B"]


@pytest.mark.parametrize(
    ("changes", "devices", "divided", "whole"),
    [
        ({"num_experts": 4}, 8, ["num_experts 4"], ["num_experts 4"]),
        ({"num_experts": 9}, 8, [], []),
        ({"moe_intermediate_size": 516}, 8, ["moe_intermediate_size 516"], []),
        (
            {"shared_expert_intermediate_size": 516},
            8,
            ["shared_expert_intermediate_size 516"],
            ["shared_expert_intermediate_size 516"],
        ),
        ({"vocab_size": 100}, 8, [], []),
    ],
)
def test_experts_are_divided_by_their_channels_or_whole(
    changes: dict[str, int], devices: int, divided: list[str], whole: list[str]
) -> None:
    sizes = DividedSizes.of_configuration(MIXTURE | changes)
    assert sizes.indivisible(devices) == divided
    assert sizes.indivisible(devices, expert_parallel=True) == whole


def test_the_vocabulary_is_filled_up_before_it_is_divided() -> None:
    sizes = DividedSizes.of_configuration({"num_attention_heads": 24, "vocab_size": 130})
    assert sizes.indivisible(3) == []
    assert DividedSizes.of_configuration({"vocab_size": 100}).indivisible(3) == ["vocab_size 100 (filled up to 128)"]


@pytest.mark.parametrize("vision", [None, RandomVisionSpec()])
def test_a_random_model_knows_the_number_of_its_tokens(vision: RandomVisionSpec | None) -> None:
    shape = RandomModelSpec(characters="abc", vision=vision)
    assert len(character_tokenizer(shape.characters, vision=vision is not None)) == shape.vocabulary


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_the_experts_of_qwen3_are_counted_under_both_of_their_names(tmp_path: Path, name: str) -> None:
    others = {field: value for field, value in QWEN3.items() if field != "num_experts"}
    [problem] = problems(tmp_path, others | {name: 128}, "Torch", {"parallelism": {"expert": 24}})
    assert problem == "spec.train.parallelism.expert: 24 devices do not divide the 128 experts of a layer."


def test_settings_of_qwen3_that_are_not_computed_are_refused_before_the_run(tmp_path: Path) -> None:
    config = QWEN3 | {"attention_bias": True, "norm_topk_prob": False, "rope_scaling": {"type": "dynamic"}}
    [problem] = problems(tmp_path, config, "Torch")
    message = "attention_bias True, not False, norm_topk_prob False, not True, rope_type dynamic, not default or linear"
    assert problem.startswith(f"spec.model.source.path: config.json: {message}")


@pytest.mark.parametrize("kind", ["llama", "qwen3", None])
def test_another_family_is_refused_with_the_supported_ones(tmp_path: Path, kind: str | None) -> None:
    [problem] = problems(tmp_path, {"model_type": kind, "text_config": TEXT})
    message = f"config.json: model_type {kind!r} is not supported; supported: qwen3_5, qwen3_5_text, "
    assert problem.startswith(f"spec.model.source.path: {message}")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4096\n"


def test_missing_and_damaged_files_are_named_together_before_the_run(tmp_path: Path) -> None:
    assert problems(tmp_path, {"text_config": TEXT}) == []
    folder = tmp_path / "model"
    (folder / "model.safetensors").unlink()
    shards = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    index = {"weight_map": {f"w{number}": shard for number, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(folder / shards[0], "w0")
    write_weights(folder / shards[1], "w1")
    (folder / shards[1]).write_bytes((folder / shards[1]).read_bytes()[:-1])
    (folder / shards[3]).write_text(POINTER)
    (folder / "tokenizer.json").write_text(POINTER)
    (folder / "config.json").write_text('{"model_type": ')
    problem_by_file = {problem.message.split(":")[0]: problem for problem in problems_of(spec("VLLM"), tmp_path)}
    assert list(problem_by_file) == ["config.json", "tokenizer.json", shards[3], shards[1], shards[2]]
    assert {problem.path for problem in problem_by_file.values()} == {"spec.model.source.path"}
    assert "not JSON" in problem_by_file["config.json"].message
    assert "damaged or cut off" in problem_by_file[shards[1]].message
    assert "missing; model.safetensors.index.json places 1 tensors there." in problem_by_file[shards[2]].message
    for name in ("tokenizer.json", shards[3]):
        assert problem_by_file[name].fix == f"Run `git lfs pull` in {folder}."


@pytest.mark.parametrize("weight_map", [None, {}, [], {"w0": 3}], ids=str)
def test_an_index_without_files_is_refused_before_the_run(tmp_path: Path, weight_map: object) -> None:
    problems(tmp_path, {"text_config": TEXT})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    [problem] = problems_of(spec("VLLM"), tmp_path)
    assert problem.message == "model.safetensors.index.json: no weight_map with a file for each tensor."


def test_a_folder_without_weights_is_refused_before_the_run(tmp_path: Path) -> None:
    problems(tmp_path, {"text_config": TEXT})
    (tmp_path / "model" / "model.safetensors").unlink()
    [problem] = problems_of(spec("VLLM"), tmp_path)
    assert problem.message.endswith("has neither model.safetensors.index.json nor model.safetensors.")


def test_qwen3_has_no_head_for_multi_token_prediction_and_no_mlp(tmp_path: Path) -> None:
    train = {"engine": "Megatron", "multiTokenPrediction": {}}
    [problem] = problems(tmp_path, QWEN3, "Torch", train)
    assert problem == (
        "spec.train.multiTokenPrediction: models of type qwen3_moe have no head for multi-token prediction."
    )
    other = tmp_path / "lora"
    other.mkdir()
    [problem] = problems(other, QWEN3, "Torch", {"lora": {"targets": ["q_proj", "gate_proj"]}})
    assert problem == "spec.train.lora.targets[1]: no linear layer of the decoder is called gate_proj."
