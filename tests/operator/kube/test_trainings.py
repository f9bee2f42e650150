"""The bodies of trainings, the newest of each."""

import json

import pytest

from qwen35_operator.kube.kinds import TRAINING
from qwen35_operator.kube.trainings import MAX_SPEC_BYTES, Trainings, condensed
from qwen35_operator.kube.watch import not_listed
from qwen35_operator.reconcile.observe import TrainingParser
from tests.operator.reconcile.world import SPEC

KEY = ("team", "demo")


def body(version: int, uid: str = "u1", **metadata) -> dict:
    metadata = {"namespace": "team", "name": "demo", "uid": uid, "resourceVersion": str(version), **metadata}
    return {"metadata": metadata, "spec": {"version": version}}


def version(trainings: Trainings) -> int | None:
    stored = trainings.get(KEY)
    return None if stored is None else stored["spec"]["version"]


def test_an_older_body_changes_nothing() -> None:
    trainings = Trainings()
    assert trainings.put(body(10))
    assert not trainings.put(body(9))
    assert not trainings.put(body(10))
    assert version(trainings) == 10
    assert (len(trainings), list(trainings)) == (1, [KEY])


def test_of_the_metadata_only_what_the_operator_reads_is_kept() -> None:
    trainings = Trainings()
    queue, retry = {"kueue.x-k8s.io/queue-name": "q"}, {"rl.qwen35.io/retry": "1"}
    others = {"managedFields": [{}], "ownerReferences": [{}], "generation": 3, "finalizers": ["a/b"]}
    trainings.put(body(1, labels={"a": "b"} | queue, annotations={"a": "b"} | retry, **others))
    metadata = trainings.get(KEY)["metadata"]
    identity = {"namespace": "team", "name": "demo", "uid": "u1", "resourceVersion": "1"}
    assert metadata == identity | {"generation": 3, "finalizers": ["a/b"], "labels": queue, "annotations": retry}


@pytest.mark.parametrize("spec", [{"version": 1}, {"a": "x" * MAX_SPEC_BYTES}, {"a": [[[1]]]}])
def test_a_condensed_training_is_stored_as_the_object_itself(spec) -> None:
    first, second = Trainings(), Trainings()
    raw = body(1, labels={"kueue.x-k8s.io/queue-name": "q"}) | {"spec": spec, "status": {"state": "Running"}}
    assert first.put(raw)
    assert second.put(json.loads(json.dumps(condensed(raw))))
    assert first.get(KEY) == second.get(KEY)
    assert first.states() == second.states() == {"Running": 1}


def test_half_of_a_letter_is_kept_as_a_question_mark() -> None:
    """An API server sends none, but Python's parser reads them, and no text can be encoded with one."""
    trainings = Trainings()
    raw = body(1) | {"spec": {"a": "\ud83d训"}, "status": {"message": "\ud83d"}}
    assert trainings.put(json.loads(json.dumps(condensed(raw))))
    assert (trainings.get(KEY)["spec"], trainings.get(KEY)["status"]) == ({"a": "?训"}, {"message": "?"})


def test_queue_labels_without_end_are_not_kept_and_the_user_learns_why() -> None:
    """Also with one parser before and after: labels change no generation."""
    trainings, parser = Trainings(), TrainingParser()
    labels = {f"kueue.x-k8s.io/{number}": "" for number in range(20_000)}
    own = {"rl.qwen35.io/retry": "1" * 100_000}
    messages = []
    for version, present in enumerate(({}, labels, {}), 1):
        trainings.put(body(version, generation=1, labels=present, annotations=own) | {"spec": SPEC})
        stored = trainings.get(KEY)
        assert stored["metadata"]["annotations"] == {"rl.qwen35.io/retry": "1" * 253}
        messages.append([problem.message for problem in parser.parse(stored)[1]])
    assert messages[0] == messages[2] == []
    assert "with the labels for queues" in messages[1][0]


def test_what_is_given_out_can_be_changed_without_harm() -> None:
    trainings = Trainings()
    trainings.put(body(1))
    trainings.get(KEY)["spec"]["version"] = 5
    assert version(trainings) == 1


def test_a_deletion_counts_for_the_training_it_means() -> None:
    trainings = Trainings()
    trainings.put(body(10, "u2"))
    trainings.remove(KEY, "u1")
    assert version(trainings) == 10
    trainings.remove(KEY, "u2")
    assert (version(trainings), len(trainings)) == (None, 0)


def test_what_a_list_lacks_is_forgotten_unless_it_is_newer_or_elsewhere() -> None:
    trainings = Trainings()
    for name, uid, of in (("gone", "u1", 5), ("there", "u2", 5), ("again", "u3", 5), ("new", "u4", 11)):
        trainings.put(body(of, uid, name=name))
    trainings.put(body(5, "u5", namespace="other", name="gone"))
    listed = {(("team", "there"), "u2"), (("team", "again"), "u9")}
    trainings.forget_unlisted("team", listed, 10)
    assert set(trainings) == {("team", "there"), ("team", "new"), ("other", "gone")}
    trainings.forget_unlisted(None, listed, 10)
    assert set(trainings) == {("team", "there"), ("team", "new")}


def test_an_answer_brings_nothing_back_that_was_deleted_meanwhile() -> None:
    trainings = Trainings()
    trainings.put_own(body(2))
    assert version(trainings) is None
    trainings.put(body(5, "u2"))
    trainings.put_own(body(6, "u1"))
    assert trainings.get(KEY)["metadata"]["uid"] == "u2"
    trainings.put_own(body(7, "u2"))
    assert version(trainings) == 7


def test_an_api_server_that_does_not_answer_for_long_is_an_obstacle() -> None:
    trainings = Trainings()
    [watch] = trainings.watches
    assert trainings.obstacles(None) == [not_listed((TRAINING,), None)]
    watch.listed = True
    assert trainings.obstacles(None) == []
    watch.seen_at -= 600
    [obstacle] = trainings.obstacles(None)
    assert obstacle.path == "qwen35trainings.rl.qwen35.io"
    watch.answered()
    assert trainings.obstacles(None) == []


def test_each_namespace_has_obstacles_of_its_own_which_name_it() -> None:
    trainings = Trainings(("team", "other"))
    assert [watch.namespace for watch in trainings.watches] == ["team", "other"]
    [obstacle] = trainings.obstacles("other")
    assert obstacle.message == "not listed yet in namespace other."
    for watch in trainings.watches:
        watch.listed = True
    trainings.watches[1].seen_at -= 600
    [obstacle] = trainings.obstacles("other")
    assert obstacle.message.startswith("the API server has not answered its watch of namespace other for 60")
    assert trainings.obstacles("team") == []
    silent = trainings.silent_seconds()
    assert 600 <= silent[TRAINING.resource, "other"] < 700
    assert silent[TRAINING.resource, "team"] < 100


def test_they_are_counted_by_state() -> None:
    trainings = Trainings()
    for number, state in enumerate(["Running", "Failed", "Running", None]):
        status = {} if state is None else {"status": {"state": state}}
        trainings.put(body(1, name=f"demo-{number}") | status)
    assert trainings.states() == {"Running": 2, "Failed": 1, "Pending": 1}
    trainings.put(body(2, name="demo-0") | {"status": {"state": "Succeeded"}})
    trainings.remove(("team", "demo-1"), "u1")
    assert trainings.states() == {"Running": 1, "Succeeded": 1, "Pending": 1}


def test_the_copy_of_the_manifest_that_kubectl_leaves_is_not_kept() -> None:
    trainings = Trainings()
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 10_000, "rl.qwen35.io/update": "b"}
    trainings.put(body(1, annotations=annotations))
    assert trainings.get(KEY)["metadata"]["annotations"] == {"rl.qwen35.io/update": "b"}
    assert len(annotations) == 2, "the object of the caller stays as it was"


def test_a_spec_that_is_too_large_is_not_kept_and_the_user_learns_why() -> None:
    trainings = Trainings()
    raw = body(1, generation=1)
    trainings.put({**raw, "spec": {"pods": {"head": {"metadata": {"annotations": {"a": "\u8bad" * 500_000}}}}}})
    stored = trainings.get(KEY)
    assert len(json.dumps(stored)) < 1000
    training, (problem,) = TrainingParser().parse(stored)
    assert training is None
    assert problem.path == "spec"
    assert "at most 262144" in problem.message
    trainings.put(body(2))
    assert version(trainings) == 2


@pytest.mark.parametrize(
    ("pods", "files", "attempts", "path"),
    [
        (60_000, 0, [], None),
        (70_000, 0, [], "spec.pods"),
        (70_000, 0, [{"number": 1}], None),
        (60_000, 150_000, [], None),
        (60_000, 300_000, [], "spec"),
    ],
)
def test_large_pods_are_refused_in_a_new_training_and_many_files_are_not(pods, files, attempts, path) -> None:
    """A training that has begun continues: an earlier release may have accepted it."""
    trainings = Trainings()
    annotations = {"a": "x" * pods}
    spec = SPEC | {"pods": {"head": {"metadata": {"annotations": annotations}}}}
    if files:
        spec["data"] = SPEC["data"] | {"train": [{"paths": ["f" * 1000 for _ in range(files // 1000)]}]}
    trainings.put(body(1, generation=1) | {"spec": spec, "status": {"attempts": attempts}})
    stored = trainings.get(KEY)
    if path is None:
        assert stored["spec"] == spec
        return
    assert stored["spec"] == {}
    training, (problem,) = TrainingParser().parse(stored)
    assert (training, problem.path) == (None, path)
    assert "bytes as JSON" in problem.message


def test_trainings_that_start_or_stop_are_more_urgent_than_those_that_run_and_these_than_the_others() -> None:
    trainings = Trainings()
    states = {"a": "Succeeded", "b": "Running", "c": "Failed", "d": None, "e": "Suspending", "f": "Suspended"}
    for number, (name, state) in enumerate(states.items()):
        status = {} if state is None else {"status": {"state": state}}
        trainings.put(body(number, f"u{number}", name=name) | status)
    assert [name for _, name in trainings.by_urgency()] == ["d", "e", "b", "a", "c", "f"]
