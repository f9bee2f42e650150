"""Where a training's files are inside its pods.

    claim of model.source        ──► MODEL_FOLDER          read-only
    claim of a data source       ──► DATA_FOLDER/<claim>   read-only
    claim of checkpoint.storage  ──► CHECKPOINT_FOLDER     its folder checkpoints/<training>
                                 └─► RUN_FOLDER            its folder runs/<training>; without a claim, the pod's own
    ConfigMap -config            ──► CONFIG_FOLDER         on the head
    relative paths, no claim     ──► EXAMPLES_FOLDER       in the image

A claim is one volume of a pod even when it has several uses: some storage cannot be mounted twice by one pod.
"""

import posixpath
from collections.abc import Iterable, Iterator
from typing import Any, Final

from qwen35_operator.api.training import Training
from qwen35_operator.desired import names
from qwen35_operator.profiles import Profile
from qwen35_trainer.contract.names import (
    CHECKPOINT_FOLDER,
    CONFIG_FOLDER,
    DATA_FOLDER,
    EXAMPLES_FOLDER,
    MODEL_FOLDER,
    RUN_FOLDER,
    config_name,
)
from qwen35_trainer.spec import CheckpointStorage, Files, ModelSource, Problem, Source, TrainingSpec
from qwen35_trainer.spec.base import LONGEST_PATH, PersistentVolumeClaim

SHM_FOLDER: Final = "/dev/shm"  # noqa: S108, where NCCL and Ray look for shared memory
OWN_FOLDERS: Final = (posixpath.dirname(RUN_FOLDER), CONFIG_FOLDER, SHM_FOLDER)
"""Nothing else is mounted in, below or above these."""
OWN_VOLUMES: Final = ("shm", "run", "config")
"""Names that stay ours where a pool, or a spec, has no such volume."""


def volumes(training: Training, profile: Profile, pool: str, shm_gib: int) -> list[dict[str, Any]]:
    """The volumes of a pod of the pool."""
    spec = training.spec
    found: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shm_gib}Gi"}},
    ]
    for index, (claim, written) in enumerate(_claims(spec).items()):
        source = {"claimName": claim} if written else {"claimName": claim, "readOnly": True}
        found.append({"name": f"claim-{index}", "persistentVolumeClaim": source})
    if _checkpoint_claim(spec) is None:
        found.append({"name": "run", "emptyDir": {}})
    if pool == names.HEAD:
        found.append({"name": "config", "configMap": {"name": config_name(training.name)}})
    else:
        found += [{"name": on.name, "hostPath": {"path": on.path, "type": on.type}} for on in profile.host_paths]
    return found


def mounts(training: Training, profile: Profile, pool: str) -> list[dict[str, Any]]:
    """Where the container `ray` has them."""
    spec, name = training.spec, training.name
    volume = {claim: f"claim-{index}" for index, claim in enumerate(_claims(spec))}
    found: list[dict[str, Any]] = [{"name": "shm", "mountPath": SHM_FOLDER}]
    if (model := spec.model.source.persistentVolumeClaim) is not None:
        found.append(_read_only(volume[model.claimName], MODEL_FOLDER))
    data = dict.fromkeys(claim.claimName for claim in _data_claims(spec))
    found += [_read_only(volume[claim], f"{DATA_FOLDER}/{claim}") for claim in data]
    if (storage := _checkpoint_claim(spec)) is None:
        found.append({"name": "run", "mountPath": RUN_FOLDER})
    else:
        for folder, path in (("checkpoints", CHECKPOINT_FOLDER), ("runs", RUN_FOLDER)):
            inside = posixpath.normpath(posixpath.join(storage.path, folder, name))
            found.append({"name": volume[storage.claimName], "mountPath": path, "subPath": inside})
    if pool == names.HEAD:
        found.append(_read_only("config", CONFIG_FOLDER))
    else:
        found += [_read_only(on.name, on.path) for on in profile.host_paths]
    return found


def mounted(spec: TrainingSpec) -> TrainingSpec:
    """The spec as the trainer inside a pod has it: every claim is the path that it is mounted at."""
    data = spec.data
    changes: dict[str, Any] = {
        "data": data.model_copy(
            update={"train": _sources_mounted(data.train), "validation": _sources_mounted(data.validation)}
        )
    }
    if (model := spec.model.source.persistentVolumeClaim) is not None:
        changes["model"] = spec.model.model_copy(update={"source": ModelSource(path=_joined(MODEL_FOLDER, model.path))})
    if _checkpoint_claim(spec) is not None:
        changes["checkpoint"] = spec.checkpoint.model_copy(
            update={"storage": CheckpointStorage(path=CHECKPOINT_FOLDER)}
        )
    return spec.model_copy(update=changes)


def problems(spec: TrainingSpec) -> Iterator[Problem]:
    """Paths that lead out of the claim that they are in, or are too long where that is mounted; exports without storage."""
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
        message = f"{spec.checkpoint.export} exports checkpoints, and pods keep none without checkpoint.storage."
        yield Problem("spec.checkpoint.export", message, "Set checkpoint.storage, or set export to None.")


def _claims(spec: TrainingSpec) -> dict[str, bool]:
    """Each claim once, in the order of its first use, and whether it is written to."""
    model, storage = spec.model.source.persistentVolumeClaim, _checkpoint_claim(spec)
    reading = [] if model is None else [model]
    found = dict.fromkeys([claim.claimName for claim in (*reading, *_data_claims(spec))], False)
    return found if storage is None else found | {storage.claimName: True}


def _data_claims(spec: TrainingSpec) -> Iterator[PersistentVolumeClaim]:
    for source in (*spec.data.train, *spec.data.validation):
        if source.files is not None and source.files.volume is not None:
            yield source.files.volume.persistentVolumeClaim


def _checkpoint_claim(spec: TrainingSpec) -> PersistentVolumeClaim | None:
    return None if spec.checkpoint.storage is None else spec.checkpoint.storage.persistentVolumeClaim


def _sources_mounted(sources: Iterable[Source]) -> tuple[Source, ...]:
    return tuple(
        source if source.files is None else source.model_copy(update={"files": _files_mounted(source.files)})
        for source in sources
    )


def _files_mounted(files: Files) -> Files:
    if files.volume is None:
        return files.model_copy(update={"paths": tuple(_joined(EXAMPLES_FOLDER, path) for path in files.paths)})
    folder = _data_folder(files.volume.persistentVolumeClaim)
    return files.model_copy(update={"paths": tuple(_joined(folder, path) for path in files.paths), "volume": None})


def _data_folder(claim: PersistentVolumeClaim) -> str:
    return _joined(f"{DATA_FOLDER}/{claim.claimName}", claim.path)


def _too_long(place: str, path: str) -> Iterator[Problem]:
    if (excess := len(path) - LONGEST_PATH) > 0:
        yield Problem(place, f"{len(path)} characters where it is mounted, {path[:60]}….", f"Shorten it by {excess}.")


def _outside(place: str, path: str) -> Iterator[Problem]:
    if posixpath.isabs(path) or ".." in path.split("/"):
        yield Problem(place, f"{path} leads out of the volume.", "Name a path below its root, without a leading /.")


def _joined(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join(folder, path))


def _read_only(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": path, "readOnly": True}
