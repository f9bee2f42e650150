"""A manifest with verl's or TRL's name for a field: the error gives the name of the field here."""

import dataclasses

import pytest

from qwen35_trainer.manifest import TrainingSpec, fields, parse_spec
from qwen35_trainer.manifest.foreign import TRL, answer
from tests.manifest.conftest import segments

COMMAND_LINE = {"model_name_or_path", "dtype", "max_prompt_length", "reward_funcs"} | {
    f"lora_{part}" for part in ("r", "alpha", "target_modules")
}
"""Options of TRL's scripts and of its older releases. The current GRPOConfig has no fields of these names."""


@pytest.mark.parametrize("name", TRL)
def test_what_stands_for_trls_name_is_a_field(name):
    assert fields.at(TrainingSpec, segments(TRL[name])) is not None


@pytest.mark.torch
def test_trls_names_are_those_of_trl():
    trl = pytest.importorskip("trl")
    trl_fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert TRL.keys() - trl_fields == COMMAND_LINE


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("train.lr", "train.optimizer.learningRate"),
        ("train.optimizer.lr", "train.optimizer.learningRate"),
        ("train.optim", "train.optimizer"),
        ("train.ppo_mini_batch_size", "train.batch.promptsPerUpdate"),
        ("train.max_grad_norm", "train.optimizer.gradientClip"),
        ("rollout.n", "algorithm.groupSize"),
        ("algorithm.num_generations", "algorithm.groupSize"),
        ("algorithm.beta", "algorithm.kl.coefficient"),
        ("algorithm.adv_estimator", "algorithm.advantage"),
        ("async.trigger_parameter_sync_step", "async.batchesPerPublication"),
        ("data.total_epochs", "data.epochs"),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(document, written, ours):
    _, problems = parse_spec(document({written: 1})["spec"])
    (problem,) = [candidate for candidate in problems if candidate.path == f"spec.{written}"]
    assert problem.message == "this is not a known field."
    assert f"is spec.{ours} here." in problem.fix
    assert fields.at(TrainingSpec, segments(ours)) is not None


@pytest.mark.parametrize(
    ("written", "value", "instead"),
    [
        ("rollout.stop", ["終わり"], "No field sets stop strings, because"),
        ("rollout.stop_strings", ["\u202eend"], "No field sets stop strings, because"),
        ("rollout.stopTokenIds", [7], "eos_token_id names in generation_config.json"),
        ("rollout.include_stop_str_in_output", True, "the response up to the string, such as with rewards[].extract"),
        ("evaluation.stop", "</answer>", "limit the response by data.maxResponseTokens"),
        ("rollout.ignore_eos", True, "always ends at the end token"),
        ("rollout.generation_kwargs", {"stop": ["終わり"]}, "none for stop strings"),
    ],
)
def test_a_setting_without_a_field_is_refused_with_another_way(document, written, value, instead):
    _, problems = parse_spec(document({written: value})["spec"])
    assert [(problem.path, problem.message) for problem in problems] == [
        (f"spec.{written}", "this is not a known field.")
    ]
    assert instead in problems[0].fix


def test_a_stop_that_concerns_no_generation_is_not_taken_for_a_stop_string(document):
    _, problems = parse_spec(document({"train.stop": 3})["spec"])
    assert "stop strings" not in problems[0].fix


@pytest.mark.parametrize("path", ["data.maxResponseTokens", "model.source.path", "rollout.topP", "rollout.minP"])
def test_what_is_named_instead_is_a_field(path):
    assert fields.at(TrainingSpec, segments(path)) is not None


def test_a_key_of_several_fields_names_them_all():
    answered = answer(["n"], TrainingSpec)
    assert answered is not None
    assert "verl's actor_rollout_ref.rollout.n is spec.algorithm.groupSize here." in answered
    assert "verl's actor_rollout_ref.rollout.val_kwargs.n is spec.evaluation.samplesPerPrompt here." in answered


def test_the_word_before_distinguishes_two_keys_of_one_name():
    answered = answer(["rollout", "val_kwargs", "n"], TrainingSpec)
    assert answered == "verl's actor_rollout_ref.rollout.val_kwargs.n is spec.evaluation.samplesPerPrompt here."


@pytest.mark.parametrize(
    ("path", "ours"),
    [(["data", "train_files"], "data.train"), (["data", "val_files"], "data.validation"), (["logger"], "tracking")],
)
def test_of_a_section_and_its_fields_the_section_is_named(path, ours):
    answered = answer(path, TrainingSpec)
    assert answered is not None
    assert answered.endswith(f" is spec.{ours} here.")
    assert answered.count("here.") == 1


@pytest.mark.parametrize("path", [["name"], ["train", "path"], ["colour"]])
def test_a_word_that_means_nothing_on_its_own_is_not_guessed_at(path):
    assert answer(path, TrainingSpec) is None


def test_similar_names_in_the_same_section_are_listed_too(document):
    _, problems = parse_spec(document({"train.optimizer.beta": 0.9})["spec"])
    assert problems[0].fix == "TRL's beta is spec.algorithm.kl.coefficient here. Did you mean beta2 or beta1?"
