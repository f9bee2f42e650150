"""Where files are inside pods."""

from qwen35_operator.desired import volumes

LONG = "x" * 1010


def test_paths_that_are_too_long_where_they_are_mounted_are_named_with_what_to_cut(make_training):
    claim = {"persistentVolumeClaim": {"claimName": "rows", "path": "a"}}
    files = {"paths": ["short.jsonl", f"{LONG}.jsonl"], "volume": claim}
    changes = {
        "data.train": [{"name": "rows", "files": files}],
        "model.source": {"persistentVolumeClaim": {"claimName": "models", "path": LONG}},
        "rewards": [{"type": "Math"}],
    }
    problems_by_path = {problem.path: problem for problem in volumes.problems(make_training(changes).spec)}
    assert set(problems_by_path) == {
        "spec.data.train[0].files.paths[1]",
        "spec.model.source.persistentVolumeClaim.path",
    }
    assert problems_by_path["spec.model.source.persistentVolumeClaim.path"].fix == "Shorten it by 8."


def test_exports_without_a_place_for_checkpoints_are_refused(make_training):
    [problem] = volumes.problems(make_training({"checkpoint.export": "AtEnd"}).spec)
    assert (problem.path, problem.fix) == ("spec.checkpoint.export", "Set checkpoint.storage, or set export to None.")
    kept = {"checkpoint.export": "AtEnd", "checkpoint.storage": {"path": "/shared"}}
    assert not list(volumes.problems(make_training(kept).spec))
