import pytest

from qwen35_trainer.manifest import ManifestError, apply_overrides


def at(document, path):
    for key in path.split("."):
        document = document[int(key)] if key.isdigit() else document[key]
    return document


# An override, where its value goes, and the value.
CASES = {
    "train.updates=5": ("spec.train.updates", 5),
    "spec.train.updates=5": ("spec.train.updates", 5),
    "metadata.name=other": ("metadata.name", "other"),
    "rewards[0].weight=2": ("spec.rewards.0.weight", 2),
    "algorithm.kl.placement=Loss": ("spec.algorithm.kl.placement", "Loss"),
    "async.maxVersionLag=2": ("spec.async.maxVersionLag", 2),
    "train.optimizer.learningRate=1e-4": ("spec.train.optimizer.learningRate", 1e-4),
    "rollout={nodes: 2, engine: Torch}": ("spec.rollout", {"nodes": 2, "engine": "Torch"}),
    "rollout=null": ("spec.rollout", None),
    'model.name=""': ("spec.model.name", ""),
    "suspend=true": ("spec.suspend", True),
    "data.train[0].gym.config.min_digits=2": ("spec.data.train.0.gym.config.min_digits", 2),
    "model.name=a=b": ("spec.model.name", "a=b"),
}


@pytest.mark.parametrize(("text", "path", "value"), [(text, *where) for text, where in CASES.items()], ids=CASES)
def test_a_value_goes_where_its_path_says(document, text, path, value):
    changed = apply_overrides(document(), [text])
    assert at(changed, path) == value


def test_the_key_of_a_free_map_may_have_dots(document):
    changed = apply_overrides(document(), ["metadata.labels.kueue.x-k8s.io/queue-name=rl"])
    assert changed["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "rl"}


def test_later_overrides_win_and_the_document_stays_as_it_was(document):
    before = document()
    assert apply_overrides(before, ["seed=1", "seed=2"])["spec"]["seed"] == 2
    assert before == document()


# An override that does not fit, and how it is reported.
WRONG = {
    "train.update=5": ("spec.train.update", "this is not a known field.", "Did you mean updates?"),
    "train.updates": ("train.updates", "has no value.", "Write train.updates=VALUE."),
    "train.updates=": (
        "spec.train.updates",
        "has an empty value.",
        "Write null for no value, or '\"\"' for an empty text.",
    ),
    "train.updates.x=1": (
        "spec.train.updates",
        "has nothing inside, so no x.",
        "Set it whole: spec.train.updates=VALUE.",
    ),
    "rewards.weight=2": ("spec.rewards", "is a list and has no weight.", "Name an item: spec.rewards[0]."),
    "rewards[1].weight=2": (
        "spec.rewards[1]",
        "spec.rewards has 1 item, counted from 0.",
        "Set it whole: spec.rewards=[...].",
    ),
    "data.validation[0].name=x": (
        "spec.data.validation[0]",
        "spec.data.validation has 0 items, counted from 0.",
        "Set it whole: spec.data.validation=[...].",
    ),
    "train..x=1": ("train..x", "is not a path.", "Write it like train.updates or rewards[0].weight."),
    "seed=[1": ("spec.seed", "[1 is not valid YAML.", "Quote the value, for the shell too."),
}


@pytest.mark.parametrize(("text", "problem"), WRONG.items(), ids=WRONG)
def test_an_override_that_does_not_fit_is_reported(document, text, problem):
    with pytest.raises(ManifestError) as caught:
        apply_overrides(document(), [text])
    (reported,) = caught.value.problems
    assert (reported.path, reported.message, reported.fix) == problem


def test_all_overrides_that_do_not_fit_are_reported(document):
    with pytest.raises(ManifestError) as caught:
        apply_overrides(document(), ["a=1", "seed=3", "b=2"])
    assert [problem.path for problem in caught.value.problems] == ["spec.a", "spec.b"]
