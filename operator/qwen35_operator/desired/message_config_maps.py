"""Builds the ConfigMaps `-control`, `-progress` and `-history`, through which operator and trainer exchange messages.

The operator writes `-control`. It creates `-progress` and `-history` without content, and afterwards only the trainer
writes these two. Therefore these two have no annotation with a hash of their content. All three ConfigMaps exist until
the training is deleted, or until cleanupSecondsAfterFinished seconds after its end (`reconcile/cleanup.py`).
"""

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import object_names
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_trainer.contract import Control
from qwen35_trainer.contract.shared_names import CONTROL_KEY, control_name, history_name, progress_name


def control(training: TrainingResource, message: Control) -> KubeObject:
    """Return the ConfigMap `-control`, with the message of the operator to the trainer."""
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(training, control_name(training.name), "control"),
            "data": {CONTROL_KEY: message.text()},
        }
    )


def empty_progress(training: TrainingResource) -> KubeObject:
    """Return the ConfigMap `-progress` as it is before the trainer's first report."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(training, progress_name(training.name), "progress"),
    }


def empty_history(training: TrainingResource) -> KubeObject:
    """Return the ConfigMap `-history` as it is before the trainer writes it.

    The component label of this ConfigMap makes the operator watch only the metadata and not the content.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(training, history_name(training.name), object_names.HISTORY),
    }
