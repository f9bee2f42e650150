import pytest

from qwen35_trainer.manifest import ManifestError, dump_manifest, load_manifest

WRONG = """\
apiVersion: rl.qwen35.io/v1alpha1
kind: Qwen35Training
metadata: {name: wrong}
spec:
  accelerator: {devicesPerNode: 8}
  model: {name: tiny, source: {random: {}}}
  data: {train: [{name: sums, gym: {task: chain_sum, size: 8}}]}
  rewards: [{type: Gym}]
  rollout: {nodes: 1}
  train: {nodes: 2, parallelism: {tensor: 4, pipeline: 3}}
  async: {stalenessThreshold: 6.0}
"""

PRINTED = """\
wrong.yaml: 2 problems
  spec.async.stalenessThreshold: 6.0 is above maxVersionLag 4: groups would start after their deadline.
      Lower it to at most 4, or raise maxVersionLag.
  spec.train.parallelism: tensor 4 × pipeline 3 × context 1 = 12 does not divide 2 nodes × 8 devices = 16.
      Use pipeline 2 or 4, or 3 nodes."""


def test_the_printed_form_names_file_field_value_and_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.yaml").write_text(WRONG)
    with pytest.raises(ManifestError) as caught:
        load_manifest((tmp_path / "wrong.yaml").relative_to(tmp_path))
    assert str(caught.value) == PRINTED


def test_one_problem_is_counted_as_one(written):
    with pytest.raises(ManifestError, match=r"small\.yaml: 1 problem\n"):
        load_manifest(written({"seed": "x"}))


def test_a_manifest_loads_with_its_overrides(written):
    manifest = load_manifest(written(), ["train.updates=5", "metadata.namespace=rl"])
    assert manifest.spec.train.updates == 5
    assert manifest.metadata.namespace == "rl"


def test_wrong_overrides_are_reported_together_with_problems_of_the_file(written):
    path = written({"seed": "3"})
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, ["train.update=5", "rollout.minNodes=9"])
    assert caught.value.file == path
    assert [problem.path for problem in caught.value.problems] == [
        "spec.train.update",
        "spec.seed",
        "spec.rollout.minNodes",
    ]


def test_an_override_can_mend_the_file(written):
    assert load_manifest(written({"seed": "3"}), ["seed=3"]).spec.seed == 3


ROUND_TRIPS = {
    "as it is": {},
    "no dual clip": {"algorithm.loss.dualClip": None},
    "keywords": {"algorithm.lambda": 0.9, "async.maxVersionLag": 2},
    "lists and maps": {"data.train.0.gym.config": {"n": 3, "y": "off", "share": 1e-9, "text": "1e-6"}},
    "failure rules": {
        "failurePolicy.rules": [{"name": "oom", "action": "Fail", "onExitCodes": [137], "onMessagePattern": "a: b"}]
    },
    "tracking": {"tracking": {"wandb": {"project": "p"}, "mlflow": {"trackingUri": "file:x", "experiment": "e"}}},
}


@pytest.mark.parametrize("changes", ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_dumped_manifest_loads_as_itself(written, tmp_path, changes):
    manifest = load_manifest(written(changes))
    (tmp_path / "again.yaml").write_text(dump_manifest(manifest))
    assert load_manifest(tmp_path / "again.yaml") == manifest


SYNCHRONOUS = {
    "colocated": {"mode": "Colocated"},
    "threshold 0": {"async": {"stalenessThreshold": 0}},
    "sft": {"mode": "SFT", "rollout": None, "rewards": []},
}


@pytest.mark.parametrize("changes", SYNCHRONOUS.values(), ids=SYNCHRONOUS)
def test_a_dump_has_the_knobs_that_its_mode_uses_and_loads_again(written, tmp_path, changes):
    manifest = load_manifest(written(changes))
    dumped = dump_manifest(manifest)
    (tmp_path / "again.yaml").write_text(dumped)
    again = load_manifest(tmp_path / "again.yaml")
    assert again.spec.async_ == manifest.spec.effective_async
    assert dump_manifest(again) == dumped


def told(path):
    with pytest.raises(ManifestError) as caught:
        load_manifest(path)
    (problem,) = caught.value.problems
    return problem.message, problem.fix


def test_a_missing_file_is_reported_with_near_names(written):
    path = written()
    assert told(path.with_name("smal.yaml")) == ("the file does not exist.", f"Did you mean {path}?")


def test_a_missing_file_is_reported_with_what_is_there(written):
    path = written()
    assert told(path.with_name("zzz.yaml")) == ("the file does not exist.", f"In {path.parent}: small.yaml.")


def test_a_missing_folder_is_reported(tmp_path):
    assert told(tmp_path / "none" / "a.yaml")[1] == f"The folder {tmp_path / 'none'} does not exist either."


def test_a_folder_without_manifests_is_reported(tmp_path):
    assert told(tmp_path / "a.yaml")[1] == f"There is no .yaml file in {tmp_path}."


def test_a_folder_is_not_a_manifest(tmp_path):
    assert told(tmp_path)[0] == "this is a folder, not a manifest."


def test_bytes_that_are_not_text_are_reported(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"kind: \xff\xfe")
    assert told(tmp_path / "a.yaml") == ("not valid UTF-8 (byte 6).", "Save the file as UTF-8 text.")


def test_broken_yaml_is_reported(tmp_path):
    (tmp_path / "a.yaml").write_text("spec: [1\n")
    assert told(tmp_path / "a.yaml")[0].startswith("line 2, column 1: ")
