"""What every object that we create has: whose it is, and what it said when we wrote it."""

from collections.abc import Mapping
from typing import Any

from qwen35_operator.api.training import Training
from qwen35_operator.api.v1alpha1 import GROUP, KIND, VERSION
from qwen35_operator.desired import names

type Manifest = Mapping[str, Any]
"""A Kubernetes object as plain data."""


def metadata(
    training: Training,
    name: str,
    component: str,
    *,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Metadata of a child: it goes when its training goes."""
    written: dict[str, Any] = {
        "name": name,
        "namespace": training.namespace,
        "labels": dict(labels or {}) | names.labels(training.name, component),
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


def sealed(manifest: Manifest) -> dict[str, Any]:
    """The object with its hash in an annotation.

    By it one sees whether it must be written again, without comparing it to what the API server has made of it.
    """
    written = manifest["metadata"]
    annotations = dict(written.get("annotations", {})) | {names.HASH: hash_of(manifest)}
    return dict(manifest) | {"metadata": dict(written) | {"annotations": annotations}}


def hash_of(manifest: Manifest) -> str:
    """16 hexadecimal digits of all that the object says, but for the hash itself."""
    written = dict(manifest["metadata"])
    annotations = {key: value for key, value in written.pop("annotations", {}).items() if key != names.HASH}
    return names.digest(dict(manifest) | {"metadata": written | {"annotations": annotations}})
