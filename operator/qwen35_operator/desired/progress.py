"""`-progress`: created empty, then the trainer's alone. It has no hash, for it is never written again."""

from qwen35_operator.api.training import Training
from qwen35_operator.desired.objects import Manifest, metadata
from qwen35_trainer.contract.names import progress_name


def build(training: Training) -> Manifest:
    """The empty ConfigMap."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(training, progress_name(training.name), "progress"),
    }
