"""Builds the ConfigMap `-config`, with the manifest that the trainer inside the pods reads."""

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_operator.desired.volumes import mounted
from qwen35_trainer.contract.shared_names import CONFIG_KEY, config_name
from qwen35_trainer.manifest import API_VERSION, KIND, Manifest, Metadata, dump_manifest
from qwen35_trainer.manifest.pods import PodsSpec


def build(training: TrainingResource) -> KubeObject:
    """Return the ConfigMap with the manifest that the trainer reads.

    In this manifest the mounted path replaces each PersistentVolumeClaim. spec.pods, which names Secrets, is left out.
    """
    spec = mounted(training.spec).model_copy(update={"suspend": False, "pods": PodsSpec()})
    manifest = Manifest(
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
