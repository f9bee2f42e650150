"""Checks that a merged pod template is consistent. The API server checks this only when KubeRay creates a pod."""

from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_operator.desired.pod_overrides import label_syntax
from qwen35_trainer.manifest import Problem


def problems(template: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield the problems of a merged pod template that the API server would report only when KubeRay creates a pod.

    Examples are invalid label keys and values, mounts of missing volumes, containers without an image, and fields
    that exclude each other. place: the field of the manifest with the user's change, such as spec.pods.head.
    """
    yield from label_syntax.problems(template, place)
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    for volume in spec["volumes"]:
        if len(sources := sorted(set(volume) - {"name"})) > 1:
            message = f"the volume {volume['name']} has {' and '.join(sources)}, which exclude each other."
            yield Problem(f"{place}.spec.volumes", message, "Keep one.")
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind, ()):
            here = f"{place}.spec.{kind}"
            if not container.get("image"):
                yield Problem(here, f"the container {container['name']} has no image.", "Add its image.")
            yield from _mounts(container, volumes, here)
            yield from _environment(container, here)


def _mounts(container: Mapping[str, Any], volumes: set[str], place: str) -> Iterator[Problem]:
    for mount in container.get("volumeMounts", ()):
        if mount.get("name") not in volumes:
            message = f"the container {container['name']} mounts {mount.get('name')}, which is not a volume of the pod."
            yield Problem(f"{place}.volumeMounts", message, "Add it to volumes, or use the name of a volume.")


def _environment(container: Mapping[str, Any], place: str) -> Iterator[Problem]:
    for variable in container.get("env", ()):
        owner = f"{variable['name']} of the container {container['name']}"
        if variable.get("value") and variable.get("valueFrom"):
            message = f"{owner} has both value and valueFrom."
            fix = "To replace one by the other, set the one that is already there to null."
            yield Problem(f"{place}.env", message, fix)
        if not isinstance(variable.get("value", ""), str):
            yield Problem(f"{place}.env", f"the value of {owner} is not a string.", "Put it in quotes.")
