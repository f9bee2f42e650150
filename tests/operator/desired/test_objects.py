"""What all children share."""

from dataclasses import replace

import pytest

from qwen35_operator.desired import all_objects, config, message_config_maps, object_names, objects, ray_job
from qwen35_operator.kube.kinds import CONFIG_MAP, HISTORY, METADATA_ONLY, watched_as
from qwen35_operator.operator_settings import OperatorSettings
from qwen35_trainer.contract import Control, StopOrder, parse_control


def always(training):
    return all_objects.always(training, OperatorSettings(), config.build(training))


@pytest.fixture
def children(make_training):
    training = make_training()
    request = Control(attempt=1, rolloutNodes=2)
    job = ray_job.build(training, OperatorSettings(), attempt=1, rollout_nodes=2)
    trainers = message_config_maps.empty_progress(training), message_config_maps.empty_history(training)
    return [
        *always(training),
        *trainers,
        message_config_maps.control(training, request),
        job,
    ]


def test_every_child_goes_when_its_training_goes(children, make_training):
    for child in children:
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == make_training().uid
        assert owner["controller"] is True
        assert owner["blockOwnerDeletion"] is True
        assert child["metadata"]["namespace"] == "rl"
        assert child["metadata"]["labels"][object_names.TRAINING] == "demo"


def test_every_child_but_the_trainers_has_its_own_hash(children):
    for child in children:
        hashed = child["metadata"].get("annotations", {}).get(object_names.HASH)
        trainers = child["metadata"]["name"] in ("demo-progress", "demo-history")
        assert hashed == (None if trainers else objects.hash_of(child))


def test_access_is_there_before_the_pods_that_need_it(make_training):
    kinds = [child["kind"] for child in always(make_training())]
    assert kinds == ["ConfigMap", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy"]


def test_an_object_that_says_the_same_has_the_same_hash(make_training):
    training = make_training()
    again = replace(training, generation=9)
    assert always(again) == always(training)


def test_sealing_twice_changes_nothing(children):
    for child in children[:5]:
        assert objects.sealed(child) == child


def test_a_change_anywhere_changes_the_hash(children):
    configuration = children[0]
    changed = configuration | {"data": {"training.yaml": configuration["data"]["training.yaml"] + " "}}
    relabelled = configuration | {"metadata": configuration["metadata"] | {"labels": {}}}
    assert len({objects.hash_of(item) for item in (configuration, changed, relabelled)}) == 3


def test_the_trainer_reads_the_request_that_was_written(make_training):
    request = Control(attempt=3, rolloutNodes=2, stop=StopOrder(id="3-suspend", reason="suspend", time=5.0))
    built = message_config_maps.control(make_training(), request)
    assert parse_control(built["data"]["control.json"]) == request


def test_what_the_trainer_says_is_never_written_by_the_operator(make_training):
    for child in (
        message_config_maps.empty_progress(make_training()),
        message_config_maps.empty_history(make_training()),
    ):
        assert child.keys() == {"apiVersion", "kind", "metadata"}


def test_of_all_children_the_history_alone_is_watched_by_its_metadata(children):
    apart = [child["metadata"]["name"] for child in children if watched_as(CONFIG_MAP, child) == HISTORY]
    assert apart == ["demo-history"]
    assert HISTORY in METADATA_ONLY
    component = children[0]["metadata"]["labels"][object_names.COMPONENT]
    assert component != object_names.HISTORY
    assert CONFIG_MAP.selector == f"{object_names.TRAINING},{object_names.COMPONENT}!={object_names.HISTORY}"
    assert HISTORY.selector == f"{object_names.TRAINING},{object_names.COMPONENT}={object_names.HISTORY}"
