"""What `qwen35 run` can do, and what a manifest asks for beyond that. Pure."""

from __future__ import annotations

from collections.abc import Callable

from qwen35_trainer.spec import Manifest, Problem, TrainingSpec

type Refuse = Callable[[str, str, str], None]


def unsupported(manifest: Manifest, *, in_cluster: bool = False) -> list[Problem]:
    """Everything in the manifest that is meant for a cluster or another engine, each with what to change."""
    spec = manifest.spec
    problems: list[Problem] = []

    def refuse(path: str, message: str, fix: str) -> None:
        problems.append(Problem(f"spec.{path}", message, fix))

    if spec.suspend:
        refuse("suspend", "the training is suspended.", "Set it to false.")
    if spec.accelerator.profile != "cpu" and not in_cluster:
        profile = spec.accelerator.profile
        refuse(
            "accelerator.profile",
            f"{profile} nodes come from a cluster; run uses processes of this machine.",
            "Set it to cpu and perNode to the processes of a pool, or kubectl apply the manifest.",
        )
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
    _engines(spec, refuse)
    return problems


def _engines(spec: TrainingSpec, refuse: Refuse) -> None:
    if spec.rollout is not None:
        if spec.rollout.engine != "Torch":
            refuse("rollout.engine", f"{spec.rollout.engine} is not available to run.", "Set it to Torch.")
        if spec.rollout.tensorParallel != 1:
            tensor = spec.rollout.tensorParallel
            refuse("rollout.tensorParallel", f"a Torch replica is one process, not {tensor}.", "Set it to 1.")
    if spec.train.engine != "FSDP":
        refuse("train.engine", f"{spec.train.engine} is not available to run.", "Set it to FSDP.")
    cut = spec.train.parallelism
    if (cut.tensor, cut.pipeline, cut.expert, cut.expertTensor) != (1, 1, 1, 1):
        refuse(
            "train.parallelism",
            "the FSDP engine knows replicas and context only.",
            "Set tensor, pipeline, expert and expertTensor to 1.",
        )
    if spec.mode != "SFT" and spec.algorithm.advantage == "GAE":
        refuse("algorithm.advantage", "GAE needs a value model, and none is trained here.", "Use GRPO or RLOO.")
