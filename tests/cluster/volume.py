"""A folder of this machine that pods have as a claim, as from a storage system that all nodes reach."""

from pathlib import Path

from tests.testbed.core import Core


def claim(core: Core, namespace: str, name: str = "shared") -> Path:
    """Makes the claim and returns its folder, which any user may write."""
    folder = core.folder / "volumes" / namespace / name
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    size = {"storage": "1Gi"}
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    core.api.post(
        "/api/v1/persistentvolumes",
        {
            "metadata": {"name": f"{namespace}-{name}"},
            "spec": shared
            | {"capacity": size, "hostPath": {"path": str(folder)}}
            | {"claimRef": {"namespace": namespace, "name": name}, "persistentVolumeReclaimPolicy": "Retain"},
        },
    )
    core.api.post(
        f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
        {
            "metadata": {"name": name},
            "spec": shared | {"volumeName": f"{namespace}-{name}", "resources": {"requests": size}},
        },
    )
    return folder
