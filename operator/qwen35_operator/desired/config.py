"""`-config`: the resolved manifest, as the trainer inside the pods reads it."""

from functools import lru_cache
from typing import Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired.objects import Manifest, metadata, sealed
from qwen35_operator.desired.volumes import mounted
from qwen35_trainer.contract.names import CONFIG_KEY, config_name
from qwen35_trainer.spec import API_VERSION, KIND, Metadata, dump_manifest
from qwen35_trainer.spec import Manifest as TrainingManifest
from qwen35_trainer.spec.pods import Pods

KEPT: Final = 2048
"""ConfigMaps that are kept: to write one as YAML takes longer than all else that a decision does."""


@lru_cache(maxsize=KEPT)
def build(training: Training) -> Manifest:
    """The ConfigMap. Claims are paths in it; spec.pods, which names Secrets, is left out."""
    spec = mounted(training.spec).model_copy(update={"suspend": False, "pods": Pods()})
    manifest = TrainingManifest(
        apiVersion=API_VERSION,
        kind=KIND,
        metadata=Metadata(name=training.name, namespace=training.namespace),
        spec=spec,
    )
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(training, config_name(training.name), "config"),
            "data": {CONFIG_KEY: dump_manifest(manifest)},
        }
    )
