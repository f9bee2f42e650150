"""`-history`: created empty, then the trainer's alone, as `-progress`. Its component keeps its content out of the watch."""

from qwen35_operator.api.training import Training
from qwen35_operator.desired import names
from qwen35_operator.desired.objects import Manifest, metadata
from qwen35_trainer.contract.names import history_name


def build(training: Training) -> Manifest:
    """The empty ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(training, history_name(training.name), names.HISTORY),
    }
