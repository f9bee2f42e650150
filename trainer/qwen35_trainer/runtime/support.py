"""The parts of a manifest that `qwen35 run` does not support on this machine, or anywhere in this release. Pure."""

from __future__ import annotations

from qwen35_trainer.manifest import Manifest, Problem, cannot_run


def unsupported(manifest: Manifest) -> list[Problem]:
    """Return a problem for each part of the manifest that `qwen35 run` does not support on this machine, or in this release."""
    spec = manifest.spec
    problems: list[Problem] = []

    def refuse(path: str, message: str, fix: str) -> None:
        problems.append(Problem(f"spec.{path}", message, fix))

    if spec.suspend:
        refuse("suspend", "the training is suspended.", "Set it to false.")
    if spec.model.source.persistentVolumeClaim is not None:
        claim = spec.model.source.persistentVolumeClaim.claimName
        refuse(
            "model.source.persistentVolumeClaim",
            f"{claim} is mounted only in a cluster.",
            "Use source.path with a folder, or source.random.",
        )
    storage = spec.checkpoint.storage
    if storage is not None and storage.persistentVolumeClaim is not None:
        refuse(
            "checkpoint.storage.persistentVolumeClaim",
            f"{storage.persistentVolumeClaim.claimName} is mounted only in a cluster.",
            "Use storage.path, or leave storage out to save into the output folder.",
        )
    for name, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            if source.files is not None and source.files.volume is not None:
                refuse(
                    f"data.{name}[{index}].files.volume",
                    "a volume is mounted only in a cluster.",
                    "Remove it and name local files in paths.",
                )
    return problems + cannot_run(spec)
