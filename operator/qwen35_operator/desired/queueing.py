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
KEYS: Final = ("ray.io/priority-class-name", "ray.io/gang-scheduling-enabled")
"""KubeRay's keys for schedulers, which are copied. Other keys below ray.io/ are not: they change how KubeRay works."""


def copied_to_job(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the labels, or annotations, that the RayJob gets from the training. KubeRay copies them to the RayCluster."""
    return {key: value for key, value in sorted(entries.items()) if key.startswith(PREFIXES) or key in KEYS}
