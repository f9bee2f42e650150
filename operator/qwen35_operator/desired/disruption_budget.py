"""Builds the PodDisruptionBudget: a drain of a node must not evict pods of the head or the train pool.

It has a name of its own, because a user may have a budget with the name of the training. It names a number of pods, because Kubernetes
computes percentages and `maxUnavailable` only for pods whose controller has a scale subresource, and a RayCluster has none.
"""

from typing import Any

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import metadata, sealed


def is_wanted(training: TrainingResource) -> bool:
    """Return whether the spec wants a PodDisruptionBudget while an attempt has pods."""
    return training.spec.disruptionBudget == "HeadAndTrain"


def build(training: TrainingResource, attempt: int) -> dict[str, Any]:
    """Return the PodDisruptionBudget that allows no eviction of a ready pod of the pools head and train.

    attempt: number of the attempt whose pods are protected.
    """
    labels = {object_names.TRAINING: training.name, object_names.ATTEMPT: str(attempt)}
    pools = {"key": object_names.POOL, "operator": "In", "values": [object_names.HEAD, object_names.TRAIN]}
    return sealed(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(training, object_names.budget_name(training.name), "disruptions"),
            "spec": {
                "minAvailable": 1 + training.spec.train.nodes,
                "selector": {"matchLabels": labels, "matchExpressions": [pools]},
                # A pod that is not ready protects nothing, and would keep its node from being repaired.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    )
