"""`-control`: what the operator asks of the running attempt."""

from qwen35_operator.api.training import Training
from qwen35_operator.desired.objects import Manifest, metadata, sealed
from qwen35_trainer.contract import Control
from qwen35_trainer.contract.names import CONTROL_KEY, control_name


def build(training: Training, control: Control) -> Manifest:
    """The ConfigMap with this request."""
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(training, control_name(training.name), "control"),
            "data": {CONTROL_KEY: control.text()},
        }
    )
