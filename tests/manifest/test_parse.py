import pytest

from qwen35_trainer.manifest import ManifestError, parse_manifest, parse_spec, parse_stored_spec


def told(document, changes):
    return {problem.path: (problem.message, problem.fix) for problem in parse_spec(document(changes)["spec"])[1]}


# A wrong value, and how it is reported.
CASES = {
    "unknown key": ({"train.update": 3}, "spec.train.update", "this is not a known field.", "Did you mean updates?"),
    "unknown key, nothing near": (
        {"tracking.zzz": 3},
        "spec.tracking.zzz",
        "this is not a known field.",
        "Known names: mlflow, tensorboard, wandb.",
    ),
    "the keyword's own spelling": (
        {"async_": {}},
        "spec.async_",
        "this is not a known field.",
        "Did you mean async?",
    ),
    "quoted integer": (
        {"seed": "3"},
        "spec.seed",
        'expected an integer, got the string "3".',
        "Write it without quotes: 3.",
    ),
    "whole number": ({"seed": 3.0}, "spec.seed", "expected an integer, got the number 3.0.", "Write 3."),
    "boolean": ({"suspend": 1}, "spec.suspend", "expected true or false, got the integer 1.", "Give true or false."),
    "text": ({"model.name": 35}, "spec.model.name", "expected a string, got the integer 35.", 'Quote it: "35".'),
    "too small": ({"train.nodes": 0}, "spec.train.nodes", "0 is less than 1.", "Use at least 1."),
    "not above": ({"rollout.topP": 0}, "spec.rollout.topP", "0 is not above 0.0.", "Use more than 0.0."),
    "too large": (
        {"rollout.memoryFraction": 2},
        "spec.rollout.memoryFraction",
        "2 is more than 1.0.",
        "Use at most 1.0.",
    ),
    "enum": (
        {"mode": "fullyasync"},
        "spec.mode",
        '"fullyasync" is not one of FullyAsync, Colocated, SFT.',
        "Did you mean FullyAsync?",
    ),
    "mapping": ({"train": 5}, "spec.train", "expected a mapping, got the integer 5.", "Give a mapping."),
    "list": ({"rewards": {}}, "spec.rewards", "expected a list, got the mapping {}.", "Give a list."),
    "item of a list": (
        {"rewards": [{"type": "Gym", "wieght": 1}]},
        "spec.rewards[0].wieght",
        "this is not a known field.",
        "Did you mean weight?",
    ),
    "empty list": ({"data.train": []}, "spec.data.train", "has 0 items.", "Give at least 1."),
    "value of a free map": (
        {"data.train.0.gym.config": {"a": [1]}},
        "spec.data.train[0].gym.config.a",
        "[1] is a list.",
        "Give a short string, a number, true or false.",
    ),
    "pattern": (
        {"data.train.0.gym.task": "Chain Sum"},
        "spec.data.train[0].gym.task",
        '"Chain Sum" has an invalid form.',
        "It must match ^[a-z0-9_]+$",
    ),
    "pattern with an example": (
        {"rewards": [{"type": "Function", "function": "my_rewards.py"}]},
        "spec.rewards[0].function",
        '"my_rewards.py" has an invalid form.',
        "Write it like my_rewards:score.",
    ),
    "path from the home folder": (
        {"data.train": [{"name": "f", "files": {"paths": ["a.jsonl", "~/b.jsonl"]}}], "rewards": [{"type": "Math"}]},
        "spec.data.train[0].files.paths[1]",
        '"~/b.jsonl" starts with ~, which is not expanded.',
        "Write the path in full, or relative to the manifest.",
    ),
    "storage in the home folder": (
        {"checkpoint.storage": {"path": "~"}},
        "spec.checkpoint.storage.path",
        '"~" starts with ~, which is not expanded.',
        None,
    ),
    "required": ({"model": {"name": "x"}}, "spec.model.source", "is required.", None),
}


@pytest.mark.parametrize(("changes", "path", "message", "fix"), CASES.values(), ids=CASES)
def test_a_wrong_field_is_reported_with_its_value_and_the_fix(document, changes, path, message, fix):
    problems = told(document, changes)
    assert list(problems) == [path]
    assert problems[path][0] == message
    assert fix is None or problems[path][1] == fix


def test_a_missing_field_is_reported_with_what_it_is(document, removed):
    assert told(document, {"model": removed}) == {"spec.model": ("is required.", "Add it: The model to train.")}


def test_all_problems_come_together_field_and_cross_field_alike(document):
    changes = {
        "seed": "3",
        "train.parallelism.tensor": 3,
        "async": {"stalenessThreshold": 6.0, "maxVersionLog": 4},
        "model.source.path": "/x",
        "rollout.minNodes": 2,
    }
    assert set(told(document, changes)) == {
        "spec.seed",
        "spec.train.parallelism",
        "spec.async.maxVersionLog",
        "spec.model.source",
        "spec.rollout.minNodes",
    }


def test_a_section_that_cannot_be_read_is_not_judged_by_its_defaults(document):
    problems = told(document, {"rollout": {"nodes": "2"}, "mode": "Colocated", "train.nodes": 2})
    assert list(problems) == ["spec.rollout.nodes"]


def test_a_list_whose_items_are_wrong_is_not_called_empty_too(document):
    assert list(told(document, {"data.train.0.gym.size": "x"})) == ["spec.data.train[0].gym.size"]


def test_a_spec_that_is_not_a_mapping_is_one_problem():
    spec, problems = parse_spec([])
    assert spec is None
    assert [(problem.path, problem.message) for problem in problems] == [
        ("spec", "expected a mapping, got the list [].")
    ]


def test_what_could_be_read_comes_back_with_its_cross_field_problems(document):
    spec, problems = parse_spec(document({"rollout.minNodes": 2})["spec"])
    assert spec is not None
    assert len(problems) == 1


@pytest.mark.parametrize("name", ["Upper", "dot.ted", "-dash", "dash-", "a" * 41, ""])
def test_names_that_child_objects_could_not_carry_are_refused(document, name):
    manifest = document()
    manifest["metadata"]["name"] = name
    with pytest.raises(ManifestError) as caught:
        parse_manifest(manifest)
    assert [problem.path for problem in caught.value.problems] == ["metadata.name"]


def test_metadata_and_spec_are_judged_together(document):
    manifest = document({"seed": "3", "rollout.minNodes": 2})
    manifest["metadata"] = {"nam": "x"}
    with pytest.raises(ManifestError) as caught:
        parse_manifest(manifest)
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"metadata.name", "metadata.nam", "spec.seed", "spec.rollout.minNodes"}


def test_another_kind_of_object_gets_one_problem_not_one_per_field():
    with pytest.raises(ManifestError) as caught:
        parse_manifest({"apiVersion": "ray.io/v1", "kind": "RayJob", "spec": {"entrypoint": "x"}})
    assert [problem.path for problem in caught.value.problems] == ["apiVersion", "kind"]


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_manifest_that_is_not_a_mapping_is_refused(document):
    with pytest.raises(ManifestError, match="expected a mapping"):
        parse_manifest(document)


def test_a_missing_spec_is_reported(document):
    manifest = document()
    del manifest["spec"]
    with pytest.raises(ManifestError) as caught:
        parse_manifest(manifest)
    assert [problem.path for problem in caught.value.problems] == ["spec"]


LATER = {"later": {"on": False}, "train.later": 1, "data.train.0.later": "x"}
"""Fields of a later release: a section, a field, and one in an item of a list."""


def test_a_stored_spec_is_read_without_the_fields_of_a_later_release(document):
    spec, problems, unknown = parse_stored_spec(document(LATER)["spec"])
    assert (spec, problems) == parse_spec(document()["spec"])
    assert set(unknown) == {"spec.later", "spec.train.later", "spec.data.train[0].later"}
    assert parse_stored_spec(document()["spec"]) == (spec, problems, ())


def test_a_stored_spec_with_another_problem_is_refused_as_any_other(document):
    wrong = document(LATER | {"seed": "3"})["spec"]
    assert parse_stored_spec(wrong) == (*parse_spec(wrong, new=False), ())
    assert parse_stored_spec([])[0] is None


def test_checks_run_on_a_stored_spec_with_fields_of_a_later_release(document):
    wrong = {"rollout.minNodes": 3, "rollout.nodes": 2}
    _, problems, unknown = parse_stored_spec(document(LATER | wrong)["spec"])
    assert problems == parse_spec(document(wrong)["spec"], new=False)[1] != []
    assert len(unknown) == len(LATER)
