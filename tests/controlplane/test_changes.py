"""What may change in a training: nothing that its checkpoints depend on, live fields at any time, the rest while
suspended. The API server says so, with what to do.
"""

from copy import deepcopy
from typing import Any

import pytest

from qwen35_operator.api import crd
from tests.testbed.api import Refused
from tests.testbed.control_plane import ControlPlane

FIXED = "Create a new Qwen35Training instead"
SUSPENDED = "Set suspend: true, change it, then set suspend: false"
LIVE = None
CLAIM = {"persistentVolumeClaim": {"claimName": "other"}}
SPEC: dict[str, Any] = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 8},
    "model": {"name": "tiny", "source": {"random": {}}},
    "data": {"train": [{"name": "sums", "gym": {"task": "chain_sum", "size": 8}}]},
    "rewards": [{"type": "Gym"}],
    "rollout": {"nodes": 2, "minNodes": 1, "maxNodes": 4},
    "checkpoint": {"storage": {"persistentVolumeClaim": {"claimName": "checkpoints"}}},
}


class Together(dict[str, Any]):
    """A field with others of its section that it needs."""


# One change of every field, each valid on its own, and the answer of the API server while the training runs.
CHANGES: dict[str, tuple[Any, str | None]] = {
    "mode": ("Colocated", FIXED),
    "seed": (1, FIXED),
    "suspend": (True, LIVE),
    "accelerator.profile": ("Ascend", FIXED),
    "accelerator.devicesPerNode": (4, SUSPENDED),
    "model.name": ("other", FIXED),
    "model.source": (CLAIM | {"random": None}, FIXED),
    "model.precision": ("FP32", FIXED),
    "data.train": ([{"name": "sums", "gym": {"task": "chain_sum", "size": 9}}], FIXED),
    "data.validation": ([{"name": "more", "gym": {"task": "chain_sum", "size": 9}}], FIXED),
    "data.maxPromptTokens": (2, FIXED),
    "data.maxResponseTokens": (2, FIXED),
    "data.overlongPrompts": ("Skip", FIXED),
    "data.chatTemplate": ({"thinking": False}, FIXED),
    "data.shuffle": (False, FIXED),
    "data.epochs": (2, FIXED),
    "rewards": ([{"type": "Gym", "weight": 2}], SUSPENDED),
    "evaluation.everyUpdates": (7, LIVE),
    "evaluation.atStart": (False, LIVE),
    "evaluation.temperature": (0.5, LIVE),
    "evaluation.samplesPerPrompt": (3, LIVE),
    "evaluation.maxPrompts": (5, LIVE),
    "algorithm.advantage": ("RLOO", SUSPENDED),
    "algorithm.advantageFunction": (Together(advantage="Function", advantageFunction="mine:advantage"), SUSPENDED),
    "algorithm.groupSize": (16, FIXED),
    "algorithm.dynamicSampling": (True, SUSPENDED),
    "algorithm.overlongPenalty": ({"bufferTokens": 1}, SUSPENDED),
    "algorithm.maskTruncated": (True, SUSPENDED),
    "algorithm.gamma": (0.5, SUSPENDED),
    "algorithm.lambda": (0.5, SUSPENDED),
    "algorithm.entropyCoefficient": (0.5, SUSPENDED),
    "algorithm.reportEntropy": (False, SUSPENDED),
    "algorithm.loss": ({"clipHigh": 0.3}, SUSPENDED),
    "algorithm.kl": ({"coefficient": 0.5}, SUSPENDED),
    "algorithm.correction": ({"cap": 9.0}, SUSPENDED),
    "rollout.engine": ("VLLM", SUSPENDED),
    "rollout.nodes": (3, LIVE),
    "rollout.minNodes": (2, LIVE),
    "rollout.maxNodes": (9, LIVE),
    "rollout.autoscale": ({}, LIVE),
    "rollout.tensorParallel": (2, SUSPENDED),
    "rollout.memoryFraction": (0.5, SUSPENDED),
    "rollout.maxSequencesPerReplica": (9, SUSPENDED),
    "rollout.temperature": (0.5, SUSPENDED),
    "rollout.topP": (0.5, SUSPENDED),
    "rollout.topK": (9, SUSPENDED),
    "rollout.minP": (0.5, SUSPENDED),
    "rollout.vllm": (Together(engine="VLLM", vllm={"eager": True}), SUSPENDED),
    "rollout.stragglerLane": (
        Together(engine="VLLM", minNodes=2, stragglerLane={"nodes": 1, "tensorParallel": 8, "afterTokens": 9}),
        SUSPENDED,
    ),
    "train.engine": ("Megatron", FIXED),
    "train.nodes": (2, SUSPENDED),
    "train.updates": (9, SUSPENDED),
    "train.parallelism": ({"tensor": 2}, FIXED),
    "train.batch": ({"promptsPerUpdate": 64}, SUSPENDED),
    "train.optimizer": ({"learningRate": 1e-5}, SUSPENDED),
    "train.offload": ({"optimizer": True}, SUSPENDED),
    "train.activationCheckpointing": (True, SUSPENDED),
    "train.reshardAfterForward": (False, SUSPENDED),
    "train.freeze": (["Embeddings"], FIXED),
    "train.router": ({"zLoss": 0.001}, SUSPENDED),
    "train.headPrecision": ("FP32", SUSPENDED),
    "train.collectiveTimeoutSeconds": (900.0, SUSPENDED),
    "train.lora": ({"rank": 8}, FIXED),
    "train.multiTokenPrediction": ({"lossWeight": 0.3}, FIXED),
    "train.overrideTransformerConfig": ({"moe_permute_fusion": True}, SUSPENDED),
    "async.stalenessThreshold": (1.0, SUSPENDED),
    "async.maxVersionLag": (9, SUSPENDED),
    "async.onMissedDeadline": ("Discard", SUSPENDED),
    "async.adaptiveDispatch": (True, SUSPENDED),
    "async.batchesPerPublication": (2, SUSPENDED),
    "async.updatesPerBatch": (2, SUSPENDED),
    "async.partialRollout": (False, SUSPENDED),
    "async.stallSeconds": (9.0, SUSPENDED),
    "publication.transport": ("ObjectStore", SUSPENDED),
    "publication.folder": ("/publications", SUSPENDED),
    "publication.wholeEvery": (4, SUSPENDED),
    "publication.bucketMebibytes": (1024, SUSPENDED),
    "publication.maxLogProbDifference": (9.0, SUSPENDED),
    "publication.timeoutSeconds": (9.0, SUSPENDED),
    "checkpoint.everyUpdates": (9, LIVE),
    "checkpoint.keep": (9, LIVE),
    "checkpoint.export": ("AtEnd", LIVE),
    "checkpoint.graceSeconds": (9, LIVE),
    "checkpoint.storage": (CLAIM, FIXED),
    "tracking.tensorboard": (False, SUSPENDED),
    "tracking.wandb": ({"project": "p"}, SUSPENDED),
    "tracking.mlflow": ({"experiment": "e", "trackingUri": "http://mlflow"}, SUSPENDED),
    "pods.image": ("other:1", SUSPENDED),
    "pods.env": ([{"name": "A", "value": "b"}], SUSPENDED),
    "pods.sizing": ("Profile", SUSPENDED),
    "pods.tls": ({"secretName": "ray-ca"}, SUSPENDED),
    "pods.head": ({"spec": {"priorityClassName": "a"}}, SUSPENDED),
    "pods.rollout": ({"spec": {"priorityClassName": "a"}}, SUSPENDED),
    "pods.train": ({"spec": {"priorityClassName": "a"}}, SUSPENDED),
    "failurePolicy.maxRestarts": (9, LIVE),
    "failurePolicy.backoffSeconds": (9.0, LIVE),
    "failurePolicy.stallFactor": (9.0, LIVE),
    "failurePolicy.rules": ([{"name": "a", "action": "Fail"}], LIVE),
    "disruptionBudget": ("HeadAndTrain", LIVE),
    "cleanupSecondsAfterFinished": (9, LIVE),
    "activeDeadlineSeconds": (9, LIVE),
}


def merge_patch(path: str, value: Any) -> dict[str, Any]:
    names = path.split(".")
    for name in reversed(names[:-1] if isinstance(value, Together) else names):
        value = {name: value}
    return {"spec": value}


def create(plane: ControlPlane, namespace: str, *, suspend: bool) -> str:
    """Path of the new training."""
    trainings = f"/apis/rl.qwen35.io/v1alpha1/namespaces/{namespace}/qwen35trainings"
    name = "suspended" if suspend else "running"
    envelope = {"apiVersion": "rl.qwen35.io/v1alpha1", "kind": "Qwen35Training", "metadata": {"name": name}}
    plane.api.post(trainings, envelope | {"spec": deepcopy(SPEC) | {"suspend": suspend}})
    return f"{trainings}/{name}"


def change(plane: ControlPlane, training: str, path: str, *, value: Any = None) -> str | None:
    """Why the API server would refuse the change; None when it would not."""
    body = merge_patch(path, CHANGES[path][0] if value is None else value)
    try:
        plane.api.request("PATCH", f"{training}?dryRun=All", body, content="application/merge-patch+json")
    except Refused as refused:
        if refused.status != 422:
            raise
        return refused.message
    return None


def test_every_field_is_tried():
    sections = crd.schema()["properties"]["spec"]["properties"]
    fields = {
        f"{name}.{part}" if part else name for name, node in sections.items() for part in node.get("properties", [""])
    }
    assert fields == CHANGES.keys()


def test_a_running_training_takes_live_changes_and_names_the_way_for_others(
    control_plane: ControlPlane, namespace: str
):
    training = create(control_plane, namespace, suspend=False)
    for path, (_, refusal) in CHANGES.items():
        answer = change(control_plane, training, path)
        if refusal is LIVE:
            assert answer is None, path
        else:
            assert answer is not None, path
            assert refusal in answer, (path, answer)
            assert path.split(".")[0] in answer


def test_a_suspended_training_takes_all_but_what_its_checkpoints_depend_on(control_plane: ControlPlane, namespace: str):
    training = create(control_plane, namespace, suspend=True)
    for path, (_, refusal) in CHANGES.items():
        answer = change(control_plane, training, path, value=False if path == "suspend" else None)
        if refusal is FIXED:
            assert answer is not None, path
            assert FIXED in answer, (path, answer)
        else:
            assert answer is None, path


@pytest.mark.parametrize("before", [False, True])
def test_a_change_may_come_with_suspending_or_resuming(control_plane: ControlPlane, namespace: str, before: bool):
    training = create(control_plane, namespace, suspend=before)
    body = {"spec": {"suspend": not before, "publication": {"timeoutSeconds": 9.0}}}
    control_plane.api.request("PATCH", training, body, content="application/merge-patch+json")


def test_a_section_that_was_left_out_is_its_defaults_and_no_change(control_plane: ControlPlane, namespace: str):
    training = create(control_plane, namespace, suspend=False)
    assert change(control_plane, training, "rollout.temperature", value=1.0) is None
    assert change(control_plane, training, "train.batch", value={"promptsPerUpdate": 32}) is None


def test_the_pool_is_scaled_by_the_scale_subresource(control_plane: ControlPlane, namespace: str):
    training = create(control_plane, namespace, suspend=False)
    body = {"spec": {"replicas": 4}}
    control_plane.api.request("PATCH", f"{training}/scale", body, content="application/merge-patch+json")
    assert control_plane.api.get(training)["spec"]["rollout"]["nodes"] == 4
    body["spec"]["replicas"] = 5
    with pytest.raises(Refused, match="maxNodes 4 is below nodes 5"):
        control_plane.api.request("PATCH", f"{training}/scale", body, content="application/merge-patch+json")
