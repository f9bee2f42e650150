"""Names of the objects, keys, files and variables that both sides use."""

CONFIG_KEY = "training.yaml"
PROGRESS_KEY = "progress.json"
CONTROL_KEY = "control.json"
HISTORY_KEY = "history.json.gz"
"""Key of `binaryData` with the history of the run: see `qwen35_trainer.progress.packed_history`."""

CONFIG_FOLDER = "/etc/qwen35"
"""Where the `-config` ConfigMap is mounted in the head pod."""
RUN_FOLDER = "/var/lib/qwen35/run"
"""The run's output folder in every pod: on the checkpoint volume where there is one."""
CHECKPOINT_FOLDER = "/var/lib/qwen35/checkpoints"
"""Where spec.checkpoint.storage.persistentVolumeClaim is mounted in every pod."""
MODEL_FOLDER = "/var/lib/qwen35/model"
"""Where spec.model.source.persistentVolumeClaim is mounted in every pod."""
DATA_FOLDER = "/var/lib/qwen35/data"
"""Claims of data sources are mounted below it, each under its claim's name."""
EXAMPLES_FOLDER = "/opt/qwen35/examples"
"""The examples in the trainer images. Relative paths of a manifest start here in a pod."""

POOL_LABEL = "rl.qwen35.io/pool"
"""Label of pods, and of the Ray nodes in them: head, rollout or train."""

TRAINING_VARIABLE = "QWEN35_TRAINING"
NAMESPACE_VARIABLE = "QWEN35_NAMESPACE"
ATTEMPT_VARIABLE = "QWEN35_ATTEMPT"
POOL_VARIABLE = "QWEN35_POOL"
POD_VARIABLE = "POD_NAME"
"""Name of the pod that a process runs in."""


def config_name(training: str) -> str:
    """Return the name of the ConfigMap with the resolved manifest."""
    return f"{training}-config"


def progress_name(training: str) -> str:
    """Return the name of the ConfigMap that the trainer writes."""
    return f"{training}-progress"


def control_name(training: str) -> str:
    """Return the name of the ConfigMap that the trainer watches."""
    return f"{training}-control"


def history_name(training: str) -> str:
    """Return the name of the ConfigMap with the history, from which reports are drawn."""
    return f"{training}-history"
