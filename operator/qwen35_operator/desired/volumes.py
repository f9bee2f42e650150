"""The volumes of a training's pods, and where they are mounted. A claim is a PersistentVolumeClaim.

    claim of model.source        ──► MODEL_FOLDER          read-only
    claim of a data source       ──► DATA_FOLDER/<claim>   read-only
    claim of checkpoint.storage  ──► CHECKPOINT_FOLDER     its folder checkpoints/<training>
                                 └─► RUN_FOLDER            its folder runs/<training>; without a claim, an emptyDir
    ConfigMap -config            ──► CONFIG_FOLDER         on the head
    data files without a claim   ──► EXAMPLES_FOLDER       in the image, if their paths are relative
    certificate for Ray's TLS    ──► TLS_FOLDER            if the spec has pods.tls (ray_tls.py)

A claim that is used for several purposes is still one volume of a pod, because some storage cannot be mounted twice by
one pod.
"""

import posixpath
from collections.abc import Iterable, Iterator
from typing import Any, Final

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired import object_names, ray_tls
from qwen35_operator.device_profiles import DeviceProfile
from qwen35_trainer.contract.shared_names import (
    CHECKPOINT_FOLDER,
    CONFIG_FOLDER,
    DATA_FOLDER,
    EXAMPLES_FOLDER,
    MODEL_FOLDER,
    RUN_FOLDER,
    config_name,
)
from qwen35_trainer.manifest import CheckpointStorageSpec, FilesSpec, ModelSourceSpec, Problem, SourceSpec, TrainingSpec
from qwen35_trainer.manifest.base import MAX_PATH_CHARACTERS, PersistentVolumeClaimSpec

SHM_FOLDER: Final = "/dev/shm"  # noqa: S108, where NCCL and Ray look for shared memory
OWN_FOLDERS: Final = (posixpath.dirname(RUN_FOLDER), CONFIG_FOLDER, SHM_FOLDER)
"""Folders that are reserved for the operator's own mounts. Users cannot mount anything at, below or above them."""
OWN_VOLUMES: Final = ("shm", "run", "config")
"""Names of the operator's volumes. They are reserved also in pods that have no such volume."""


def volumes(training: TrainingResource, profile: DeviceProfile, pool: str, shm_gib: int) -> list[dict[str, Any]]:
    """Return the volumes of a pool's pods.

    Every pod has shared memory and the PersistentVolumeClaims of the spec. If the spec has no claim for checkpoints,
    every pod also has an emptyDir for the run's folder. With pods.tls, every pod has the volumes of Ray's TLS. The head also has the manifest. Other pods also have the device
    files of their node. shm_gib: maximum size of the shared memory, in GiB.
    """
    spec = training.spec
    result: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
    ]
    for index, (claim, written) in enumerate(_claims(spec).items()):
        source = {"claimName": claim} if written else {"claimName": claim, "readOnly": True}
        result.append({"name": f"claim-{index}", "persistentVolumeClaim": source})
    if _checkpoint_claim(spec) is None:
        result.append({"name": "run", "emptyDir": {}})
    result += ray_tls.volumes(spec)
    if pool == object_names.HEAD:
        result.append({"name": "config", "configMap": {"name": config_name(training.name)}})
    else:
        result += [
            {"name": host.name, "hostPath": {"path": host.path, "type": host.type}} for host in profile.host_paths
        ]
    return result


def mounts(training: TrainingResource, profile: DeviceProfile, pool: str) -> list[dict[str, Any]]:
    """Return where the container `ray` mounts the volumes of its pod."""
    spec, name = training.spec, training.name
    volume = {claim: f"claim-{index}" for index, claim in enumerate(_claims(spec))}
    result: list[dict[str, Any]] = [{"name": "shm", "mountPath": SHM_FOLDER}]
    if (model := spec.model.source.persistentVolumeClaim) is not None:
        result.append(_read_only(volume[model.claimName], MODEL_FOLDER))
    data = dict.fromkeys(claim.claimName for claim in _data_claims(spec))
    result += [_read_only(volume[claim], f"{DATA_FOLDER}/{claim}") for claim in data]
    if (storage := _checkpoint_claim(spec)) is None:
        result.append({"name": "run", "mountPath": RUN_FOLDER})
    else:
        for folder, path in (("checkpoints", CHECKPOINT_FOLDER), ("runs", RUN_FOLDER)):
            inside = posixpath.normpath(posixpath.join(storage.path, folder, name))
            result.append({"name": volume[storage.claimName], "mountPath": path, "subPath": inside})
    result += ray_tls.mounts(spec)
    if pool == object_names.HEAD:
        result.append(_read_only("config", CONFIG_FOLDER))
    else:
        result += [_read_only(host.name, host.path) for host in profile.host_paths]
    return result


def mounted(spec: TrainingSpec) -> TrainingSpec:
    """Return the spec for the trainer inside a pod: each PersistentVolumeClaim is replaced by the path of its mount.

    Relative paths of data files that are in no claim become paths in the image.
    """
    data = spec.data
    changes: dict[str, Any] = {
        "data": data.model_copy(
            update={"train": _sources_mounted(data.train), "validation": _sources_mounted(data.validation)}
        )
    }
    if (model := spec.model.source.persistentVolumeClaim) is not None:
        changes["model"] = spec.model.model_copy(
            update={"source": ModelSourceSpec(path=_joined(MODEL_FOLDER, model.path))}
        )
    if _checkpoint_claim(spec) is not None:
        changes["checkpoint"] = spec.checkpoint.model_copy(
            update={"storage": CheckpointStorageSpec(path=CHECKPOINT_FOLDER)}
        )
    return spec.model_copy(update=changes)


def problems(spec: TrainingSpec) -> Iterator[Problem]:
    """Yield a problem for each path in the spec that pods cannot use, and for missing storage.

    Pods cannot use a path that leads out of its volume. They cannot use a path either that becomes too long when the
    folder of the mount is put before it. Storage is missing if checkpoint.export needs checkpoint.storage, and the spec has none.
    """
    places = [
        ("spec.model.source", spec.model.source.persistentVolumeClaim),
        ("spec.checkpoint.storage", _checkpoint_claim(spec)),
    ]
    for part, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            if source.files is None or source.files.volume is None:
                continue
            place = f"spec.data.{part}[{index}].files"
            holding = source.files.volume.persistentVolumeClaim
            places.append((f"{place}.volume", holding))
            for at, path in enumerate(source.files.paths):
                yield from _outside(f"{place}.paths[{at}]", path)
                yield from _too_long(f"{place}.paths[{at}]", _joined(_data_folder(holding), path))
    for place, claim in places:
        if claim is not None:
            yield from _outside(f"{place}.persistentVolumeClaim.path", claim.path)
    if (model := spec.model.source.persistentVolumeClaim) is not None:
        yield from _too_long("spec.model.source.persistentVolumeClaim.path", _joined(MODEL_FOLDER, model.path))
    if spec.checkpoint.export != "None" and spec.checkpoint.storage is None:
        message = f"{spec.checkpoint.export} exports checkpoints, but pods keep none without checkpoint.storage."
        yield Problem("spec.checkpoint.export", message, "Set checkpoint.storage, or set export to None.")


def _claims(spec: TrainingSpec) -> dict[str, bool]:
    """Return the names of the claims, in the order of first use, and for each whether the pods write to it."""
    model, storage = spec.model.source.persistentVolumeClaim, _checkpoint_claim(spec)
    reading = [] if model is None else [model]
    claims = dict.fromkeys([claim.claimName for claim in (*reading, *_data_claims(spec))], False)
    return claims if storage is None else claims | {storage.claimName: True}


def _data_claims(spec: TrainingSpec) -> Iterator[PersistentVolumeClaimSpec]:
    for source in (*spec.data.train, *spec.data.validation):
        if source.files is not None and source.files.volume is not None:
            yield source.files.volume.persistentVolumeClaim


def _checkpoint_claim(spec: TrainingSpec) -> PersistentVolumeClaimSpec | None:
    return None if spec.checkpoint.storage is None else spec.checkpoint.storage.persistentVolumeClaim


def _sources_mounted(sources: Iterable[SourceSpec]) -> tuple[SourceSpec, ...]:
    return tuple(
        source if source.files is None else source.model_copy(update={"files": _files_mounted(source.files)})
        for source in sources
    )


def _files_mounted(files: FilesSpec) -> FilesSpec:
    if files.volume is None:
        return files.model_copy(update={"paths": tuple(_joined(EXAMPLES_FOLDER, path) for path in files.paths)})
    folder = _data_folder(files.volume.persistentVolumeClaim)
    return files.model_copy(update={"paths": tuple(_joined(folder, path) for path in files.paths), "volume": None})


def _data_folder(claim: PersistentVolumeClaimSpec) -> str:
    return _joined(f"{DATA_FOLDER}/{claim.claimName}", claim.path)


def _too_long(place: str, path: str) -> Iterator[Problem]:
    if (excess := len(path) - MAX_PATH_CHARACTERS) > 0:
        yield Problem(place, f"{len(path)} characters after mounting: {path[:60]}….", f"Shorten it by {excess}.")


def _outside(place: str, path: str) -> Iterator[Problem]:
    if posixpath.isabs(path) or ".." in path.split("/"):
        yield Problem(place, f"{path} leads out of the volume.", "Name a path below its root, without a leading /.")


def _joined(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _read_only(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": path, "readOnly": True}
