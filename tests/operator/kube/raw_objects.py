"""Raw objects in the API server's format."""

from typing import Any

from qwen35_operator.api.v1alpha1 import KIND
from qwen35_operator.desired import object_names

UID = "11111111-2222-3333-4444-555555555555"


def metadata(name: str, *, training: str = "demo", version: int = 1, uid: str = "u1", owner: str = UID, **more) -> dict:
    """Metadata of a child of the training with the uid `UID`."""
    return {
        "name": name,
        "namespace": "team",
        "uid": uid,
        "resourceVersion": str(version),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {object_names.TRAINING: training, **more.pop("labels", {})},
        "ownerReferences": [{"kind": KIND, "name": training, "uid": owner, "controller": True}],
        **more,
    }


def pod(
    name: str = "demo-1-rollout-a", *, pool: str = "rollout", lane: str = "", status: Any = None, **metadata_fields
) -> dict:
    labels = {object_names.ATTEMPT: "1", object_names.POOL: pool} | ({object_names.LANE: lane} if lane else {})
    owner = {"kind": "RayCluster", "name": "demo-1-x", "uid": "cluster", "controller": True}
    metadata_fields = {"ownerReferences": [owner], **metadata_fields}
    return {
        "metadata": metadata(name, labels=labels, **metadata_fields),
        "spec": {"nodeName": "node-1"},
        "status": status or {},
    }


def config_map(name: str = "demo-progress", data: Any = None, **metadata_fields) -> dict:
    return {"metadata": metadata(name, **metadata_fields), **({} if data is None else {"data": data})}


def ray_job(name: str = "demo-1", *, attempt: int = 1, status: Any = None, **metadata_fields) -> dict:
    extra = {
        "labels": {object_names.ATTEMPT: str(attempt)},
        "annotations": {object_names.HASH: "h", object_names.SPEC_HASH: "s"},
    }
    return {
        "metadata": metadata(name, **extra, **metadata_fields),
        "spec": {},
        **({} if status is None else {"status": status}),
    }


def ray_cluster(name: str = "demo-1-x", *, groups: Any = (), status: Any = None, **metadata_fields) -> dict:
    spec = {"workerGroupSpecs": list(groups)}
    metadata_fields = {"labels": {object_names.ATTEMPT: "1"}, **metadata_fields}
    return {"metadata": metadata(name, **metadata_fields), "spec": spec, "status": status or {}}
