"""The labels and annotations that a RayJob copies from its training, for queues and gang schedulers.

Queues and schedulers read the RayJob and not the training.
"""

from collections.abc import Mapping
from typing import Final

PREFIXES: Final = (
    "kueue.x-k8s.io/",
    "volcano.sh/",
    "scheduling.volcano.sh/",
    "yunikorn.apache.org/",
    "kai.scheduler/",
    "scheduling.x-k8s.io/",
    # MindCluster's scheduling policies, which Volcano copies to the PodGroup.
    "huawei.com/",
)
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""Label with the name of Kueue's LocalQueue. Kueue then decides when a job runs, and how many nodes it gets."""
KEYS: Final = ("ray.io/priority-class-name", "ray.io/gang-scheduling-enabled")
"""Keys that KubeRay reads for schedulers; they are copied too. All other keys that begin with ray.io/ change how
KubeRay works and are not copied."""


def copied_to_job(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries that a RayJob copies from its training. KubeRay copies them from the RayJob to the RayCluster.

    entries: the labels or the annotations of the training.
    """
    return {key: value for key, value in sorted(entries.items()) if key.startswith(PREFIXES) or key in KEYS}
