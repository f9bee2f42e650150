"""spec.checkpoint: when checkpoints are saved, and where."""

from typing import Literal

from pydantic import Field

from qwen35_trainer.manifest.base import PathName, PersistentVolumeClaimSpec, Section

Export = Literal["None", "AtEnd", "EveryCheckpoint"]


class CheckpointStorageSpec(Section):
    """Storage of checkpoints: exactly one of persistentVolumeClaim and path."""

    persistentVolumeClaim: PersistentVolumeClaimSpec | None = Field(
        None,
        description="Folder of a PersistentVolumeClaim that every node mounts; each training has its own subfolder, "
        "named after it. No default. verl: trainer.default_local_dir.",
    )
    path: PathName | None = Field(
        None,
        description="Folder that every node can access, used by this run alone: another run is refused, because old "
        "checkpoints are deleted. No default. verl: trainer.default_local_dir.",
    )


class CheckpointSpec(Section):
    """Frequency, number and storage of checkpoints."""

    everyUpdates: int = Field(
        20,
        ge=1,
        le=1_000_000,
        description="Updates between checkpoints; the last update is always saved. Default 20, as in the 35B recipe. "
        "verl: trainer.save_freq.",
    )
    keep: int = Field(
        3,
        ge=1,
        le=1000,
        description="Number of checkpoints to keep. Default 3, so that one unusable checkpoint does no harm. verl: "
        "trainer.max_actor_ckpt_to_keep.",
    )
    export: Export = Field(
        "None",
        description="Which checkpoints are also written as Hugging Face folders, in exports/ next to the checkpoints:"
        " none, the last one of a run that completes, or every one. As many are kept as checkpoints. "
        "Default None: qwen35 export can write one at any time. verl: actor.checkpoint.save_contents.",
    )
    graceSeconds: int = Field(
        600,
        ge=0,
        le=86_400,
        description="Seconds that a training has to finish its update and save, after an order to stop and before its pods are "
        "deleted: suspended, past its deadline, or with a changed spec. Default 600, which fits the update and the save of a large model. verl: none.",
    )
    storage: CheckpointStorageSpec | None = Field(
        None,
        description="Storage of checkpoints: exactly one of persistentVolumeClaim and path. Default: the run's output"
        " folder; in a cluster, where pods share no folder, no checkpoint is kept without it. verl: "
        "trainer.default_local_dir.",
    )
