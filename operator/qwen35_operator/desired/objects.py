"""Metadata of every object that the operator creates: labels, the owner, and a hash of the object's content."""

from collections.abc import Mapping
from typing import Any

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.api.v1alpha1 import GROUP, KIND, VERSION
from qwen35_operator.desired import object_names

type KubeObject = Mapping[str, Any]
"""A Kubernetes object as plain data."""


def metadata(
    training: TrainingResource,
    name: str,
    component: str,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the metadata of a child. Its ownerReference makes Kubernetes delete the child together with its training.

    The operator adds no finalizer, so the deletion of a training does not wait for the operator. (A user may add one to
    have a last checkpoint saved: `reconcile/deletion.py`.) The pods get SIGTERM and their grace period.
    PersistentVolumeClaims are not children, so checkpoints stay.

    component: role of the object, for a label. labels: added to the labels that every child has. annotations: None for
    no annotations.
    """
    written: dict[str, Any] = {
        "name": name,
        "namespace": training.namespace,
        "labels": dict(labels or {}) | object_names.labels(training.name, component),
    }
    if annotations:
        written["annotations"] = dict(annotations)
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": training.name,
        "uid": training.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return written | {"ownerReferences": [owner]}


def sealed(manifest: KubeObject) -> dict[str, Any]:
    """Return the object with an annotation that contains the hash of the object.

    The hash shows whether the object must be written again. A comparison with the stored object could not show this,
    because the API server adds defaults to that object.
    """
    written = manifest["metadata"]
    annotations = dict(written.get("annotations", {})) | {object_names.HASH: hash_of(manifest)}
    return dict(manifest) | {"metadata": dict(written) | {"annotations": annotations}}


def hash_of(manifest: KubeObject) -> str:
    """Return the hash of the whole object except the hash annotation: 16 hexadecimal digits."""
    written = dict(manifest["metadata"])
    annotations = {key: value for key, value in written.pop("annotations", {}).items() if key != object_names.HASH}
    return object_names.digest(dict(manifest) | {"metadata": written | {"annotations": annotations}})
