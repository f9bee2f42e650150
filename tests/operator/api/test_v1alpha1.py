import pytest
from pydantic import ValidationError

from qwen35_operator.api import v1alpha1
from qwen35_operator.api.v1alpha1 import Condition, TrainingStatus
from qwen35_trainer.manifest import API_VERSION, KIND


def test_the_operator_and_the_manifest_name_the_same_kind():
    assert f"{v1alpha1.GROUP}/{v1alpha1.VERSION}" == API_VERSION
    assert v1alpha1.KIND == KIND


def test_an_empty_status_is_valid():
    assert TrainingStatus() == TrainingStatus.model_validate({})


def test_a_status_is_read_back_as_it_was_written():
    time = "2026-11-21T09:00:00Z"
    status = TrainingStatus.model_validate(
        {
            "observedGeneration": 3,
            "state": "Running",
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": time, "reason": "Training", "message": ""}
            ],
            "pools": [{"name": "rollout", "desired": 2, "ready": 2}],
            "progress": {"update": 7, "totalUpdates": 100, "version": 6, "reward": 0.25, "lagMean": 0.5, "time": time},
            "lastCheckpoint": {"uri": "pvc://ckpt/7", "update": 7, "time": time},
            "attempts": [{"number": 1, "job": "tiny-1", "outcome": "Running", "startTime": time}],
            "rolloutNodes": 2,
            "rolloutSelector": "app.kubernetes.io/instance=tiny",
        }
    )
    assert TrainingStatus.model_validate(status.model_dump()) == status


def test_a_condition_needs_a_reason():
    with pytest.raises(ValidationError, match="reason"):
        Condition(type="Ready", status="True", lastTransitionTime="2026-11-21T09:00:00Z", reason="", message="")
