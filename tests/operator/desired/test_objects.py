"""What all children share."""

from dataclasses import replace

import pytest

from qwen35_operator.desired import control, history, names, objects, objects_of, progress, ray_job
from qwen35_operator.kube.kinds import CONFIG_MAP, HISTORY, METADATA_ONLY, watched_as
from qwen35_operator.settings import Settings
from qwen35_trainer.contract import Control, Stop, parse_control


@pytest.fixture
def children(make_training):
    training = make_training()
    request = Control(attempt=1, rolloutNodes=2)
    job = ray_job.build(training, Settings(), attempt=1, rollout_nodes=2)
    trainers = progress.build(training), history.build(training)
    return [*objects_of.always(training), *trainers, control.build(training, request), job]


def test_every_child_goes_when_its_training_goes(children, make_training):
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == make_training().uid
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is True
        assert child["metadata"]["namespace"] == "rl"
        assert child["metadata"]["labels"][names.TRAINING] == "demo"


def test_every_child_but_the_trainers_has_its_own_hash(children):
    for child in children:
        hashed = child["metadata"].get("annotations", {}).get(names.HASH)
        trainers = child["metadata"]["name"] in ("demo-progress", "demo-history")
        assert hashed == (None if trainers else objects.hash_of(child))


def test_access_is_there_before_the_pods_that_need_it(make_training):
    kinds = [child["kind"] for child in objects_of.always(make_training())]
    assert kinds == ["ConfigMap", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"]


def test_an_object_that_says_the_same_has_the_same_hash(make_training):
    training = make_training()
    again = replace(training, generation=9)
    assert objects_of.always(again) == objects_of.always(training)


def test_sealing_twice_changes_nothing(children):
    for child in children[:5]:
        assert objects.sealed(child) == child


def test_a_change_anywhere_changes_the_hash(children):
    config = children[0]
    changed = config | {"data": {"training.yaml": config["data"]["training.yaml"] + " "}}
    relabelled = config | {"metadata": config["metadata"] | {"labels": {}}}
    assert len({objects.hash_of(one) for one in (config, changed, relabelled)}) == 3


def test_the_trainer_reads_the_request_that_was_written(make_training):
    request = Control(attempt=3, rolloutNodes=2, stop=Stop(id="3-suspend", reason="suspend", time=5.0))
    built = control.build(make_training(), request)
    assert parse_control(built["data"]["control.json"]) == request


def test_what_the_trainer_says_is_never_written_by_the_operator(make_training):
    for child in (progress.build(make_training()), history.build(make_training())):
        assert child.keys() == {"apiVersion", "kind", "metadata"}


def test_of_all_children_the_history_alone_is_watched_by_its_metadata(children):
    apart = [child["metadata"]["name"] for child in children if watched_as(CONFIG_MAP, child) == HISTORY]
    assert apart == ["demo-history"]
    assert HISTORY in METADATA_ONLY
    component = children[0]["metadata"]["labels"][names.COMPONENT]
    assert component != names.HISTORY
    assert CONFIG_MAP.selector == f"{names.TRAINING},{names.COMPONENT}!={names.HISTORY}"
    assert HISTORY.selector == f"{names.TRAINING},{names.COMPONENT}={names.HISTORY}"
