"""What a training hands on to its job for queues and gang schedulers: they know the RayJob, not the training."""

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
"""KubeRay's own keys for schedulers; the rest of ray.io/ changes how it works."""


def handed_on(given: Mapping[str, str]) -> dict[str, str]:
    """The labels, or annotations, of a training that its RayJob gets as well. KubeRay copies them to the RayCluster."""
    return {key: value for key, value in sorted(given.items()) if key.startswith(PREFIXES) or key in KEYS}
