"""Names of the objects, keys, folders and variables that both the operator and the trainer use."""

CONFIG_KEY = "training.yaml"
PROGRESS_KEY = "progress.json"
CONTROL_KEY = "control.json"
HISTORY_KEY = "history.json.gz"
"""Key of the run's history in `binaryData` of the ConfigMap `<training>-history` (`qwen35_trainer.progress.packed_history`)."""

CONFIG_FOLDER = "/etc/qwen35"
"""Folder of the head pod at which the ConfigMap `<training>-config` is mounted."""
RUN_FOLDER = "/var/lib/qwen35/run"
"""The run's output folder in every pod. It is on the volume of the checkpoints if the manifest names such a volume."""
CHECKPOINT_FOLDER = "/var/lib/qwen35/checkpoints"
"""Folder of every pod at which the claim spec.checkpoint.storage.persistentVolumeClaim is mounted."""
MODEL_FOLDER = "/var/lib/qwen35/model"
"""Folder of every pod at which the claim spec.model.source.persistentVolumeClaim is mounted."""
DATA_FOLDER = "/var/lib/qwen35/data"
"""Folder of every pod with one folder for each claim of a data source. The claim is mounted at the folder with its name."""
TLS_FOLDER = "/var/lib/qwen35/tls"
"""Folder of every pod with the pod's certificate and private key for Ray's TLS, if the manifest has spec.pods.tls."""
AUTHORITY_FOLDER = "/var/lib/qwen35/authority"
"""Folder at which the Secret spec.pods.tls.secretName is mounted, only in the container that makes the pod's certificate."""
CERTIFICATE_FILE = "tls.crt"
"""File in TLS_FOLDER with the pod's certificate; in AUTHORITY_FOLDER, with the authority's certificate."""
KEY_FILE = "tls.key"
"""File in TLS_FOLDER with the private key of the pod; in AUTHORITY_FOLDER, with that of the authority."""
AUTHORITY_FILE = "ca.crt"
"""File in TLS_FOLDER with the authority's certificate, by which Ray's processes check each other's certificates."""
EXAMPLES_FOLDER = "/opt/qwen35/examples"
"""Folder with the examples in the trainer images. In a pod, relative paths of a manifest start from this folder."""

INLINE_ANSWERS = {"RAY_max_direct_call_object_size": str(8 * 2**20)}
"""Environment variable for all Ray processes: the size in bytes below which arguments and results of a call are sent
inline, with the call. Ray puts larger ones into its object store, which costs the driver more time than the call. Ray's
default is 100 KiB; a replica's report with the tokens of all its sequences has about 1 MB."""

POOL_LABEL = "rl.qwen35.io/pool"
"""Label with the pool of a pod, and of the Ray node in it: head, rollout or train."""
LANE_LABEL = "rl.qwen35.io/straggler-lane"
"""Label of the rollout pods, and of the Ray nodes in them, in a training with a straggler lane.

The value is "true" for a pod with replicas of the straggler lane, and "false" for a pod with other replicas.
"""

TRAINING_VARIABLE = "QWEN35_TRAINING"
NAMESPACE_VARIABLE = "QWEN35_NAMESPACE"
ATTEMPT_VARIABLE = "QWEN35_ATTEMPT"
UID_VARIABLE = "QWEN35_TRAINING_UID"
"""Environment variable with the uid of the training, which distinguishes it from an earlier training of the same name."""
POOL_VARIABLE = "QWEN35_POOL"
POD_VARIABLE = "POD_NAME"
"""Environment variable with the name of the pod in which a process runs."""
CLUSTER_VARIABLE = "RAY_CLUSTER_NAME"
"""Environment variable with the name of the RayCluster of a pod. KubeRay sets it in every pod."""


def config_name(training: str) -> str:
    """Return the name of the ConfigMap with the resolved manifest of a training."""
    return f"{training}-config"


def progress_name(training: str) -> str:
    """Return the name of the ConfigMap with the trainer's progress report about a training."""
    return f"{training}-progress"


def control_name(training: str) -> str:
    """Return the name of the ConfigMap with the operator's orders for a training, which the trainer watches."""
    return f"{training}-control"


def history_name(training: str) -> str:
    """Return the name of the ConfigMap with the history of a training's run, from which `qwen35 report` draws its report."""
    return f"{training}-history"
