"""Builds the ConfigMap `-config`, with the manifest that the trainer inside the pods reads.

The trainer may be of an earlier release than the operator, because a training keeps its trainer
(`reconcile/releases.py`). The manifest must not contain fields that the trainer does not know, so fields with their
defaults are left out. A field whose default a release has changed is always written, because the trainer may have
another default.
"""

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.objects import KubeObject, metadata, sealed
from qwen35_operator.desired.spec_fields import has_first_default, plain_fields
from qwen35_operator.desired.volumes import mounted
from qwen35_trainer.contract.shared_names import CONFIG_KEY, config_name
from qwen35_trainer.manifest import API_VERSION, KIND
from qwen35_trainer.manifest.base import Section
from qwen35_trainer.manifest.document import dump_document
from qwen35_trainer.manifest.pods import PodsSpec


def build(training: TrainingResource) -> KubeObject:
    """Return the ConfigMap with the manifest that the trainer reads.

    In this manifest, each PersistentVolumeClaim is replaced by the path at which it is mounted. spec.pods, which names
    Secrets, is left out, and so are fields that may change while the trainer runs and do not concern it.
    """
    for_operator = {"suspend": False, "disruptionBudget": "None", "pods": PodsSpec()}
    spec = mounted(training.spec).model_copy(update=for_operator)
    manifest = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": training.name, "namespace": training.namespace},
        "spec": plain_fields(spec, _left_out),
    }
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(training, config_name(training.name), "config"),
            "data": {CONFIG_KEY: dump_document(manifest)},
        }
    )


def _left_out(section: Section, name: str, path: str, value: object) -> bool:
    """Return whether the field has its default, and every release that has the field has the same default."""
    default = type(section).model_fields[name].get_default(call_default_factory=True)
    return has_first_default(path, value) and getattr(section, name) == default
