"""spec.checkpoint: what a resumed run starts from."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.spec.base import PathName, PersistentVolumeClaim, Section

Export = Literal["None", "AtEnd", "EveryCheckpoint"]


class CheckpointStorage(Section):
    """Where checkpoints are kept: exactly one of the two."""

    persistentVolumeClaim: PersistentVolumeClaim | None = Field(
        None,
        description="Folder of a claim that every node mounts; each training has a folder of its name in it. No default. "
        "verl: trainer.default_local_dir.",
    )
    path: PathName | None = Field(
        None,
        description="Folder that every node sees, for this run alone: another run is refused, because older checkpoints are "
        "deleted. No default. verl: trainer.default_local_dir.",
    )


class Checkpoint(Section):
    """How often, how many, where."""

    everyUpdates: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Updates between checkpoints; the last update always has one. 20 as in the 35B recipe. "
        "verl: trainer.save_freq.",
    )
    keep: int = Field(
        3,
        ge=1,
        le=1000,
        description="Checkpoints that are kept. 3 survives a bad one. verl: trainer.max_actor_ckpt_to_keep.",
    )
    export: Export = Field(
        "None",
        description="Which checkpoints are also written as Hugging Face folders, below exports/ in the folder of the "
        "checkpoints: none, the last one of a run that reaches its end, or every one. As many are kept as checkpoints. None by "
        "default: qwen35 export writes one at any time. verl: actor.checkpoint.save_contents.",
    )
    graceSeconds: int = Field(
        600,
        ge=0,
        le=86_400,
        description="Seconds that a suspended training has to finish its update and save before its pods are deleted. "
        "600 fits the update and the save of a large model. verl: none.",
    )
    storage: CheckpointStorage | None = Field(
        None,
        description="Where they are kept: exactly one of persistentVolumeClaim and path. By default the run's output "
        "folder; in a cluster, whose pods share none, nothing is kept then. verl: trainer.default_local_dir.",
    )
