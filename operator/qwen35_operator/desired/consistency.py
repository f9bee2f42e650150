"""Whether a merged pod template holds together: what the API server would only say when KubeRay creates the pod."""

from collections.abc import Iterator, Mapping
from typing import Any

from qwen35_operator.desired import label_syntax
from qwen35_trainer.spec import Problem


def problems(template: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """References that lead nowhere, values given twice, and labels that are none.

    `place` is where the change is in the manifest.
    """
    yield from label_syntax.problems(template, place)
    spec = template["spec"]
    known = {volume["name"] for volume in spec["volumes"]}
    for volume in spec["volumes"]:
        if len(sources := sorted(set(volume) - {"name"})) > 1:
            wrong = f"the volume {volume['name']} has {' and '.join(sources)}, which exclude each other."
            yield Problem(f"{place}.spec.volumes", wrong, "Keep one.")
    for kind in ("containers", "initContainers"):
        for container in spec.get(kind, ()):
            here = f"{place}.spec.{kind}"
            if not container.get("image"):
                yield Problem(here, f"the container {container['name']} has no image.", "Add its image.")
            yield from _mounts(container, known, here)
            yield from _environment(container, here)


def _mounts(container: Mapping[str, Any], known: set[str], place: str) -> Iterator[Problem]:
    for mount in container.get("volumeMounts", ()):
        if mount.get("name") not in known:
            wrong = f"the container {container['name']} mounts {mount.get('name')}, and there is no such volume."
            yield Problem(f"{place}.volumeMounts", wrong, f"Add it to volumes; there are {', '.join(sorted(known))}.")


def _environment(container: Mapping[str, Any], place: str) -> Iterator[Problem]:
    for variable in container.get("env", ()):
        named = f"{variable['name']} of the container {container['name']}"
        if variable.get("value") and variable.get("valueFrom"):
            wrong = f"{named} has both value and valueFrom."
            yield Problem(f"{place}.env", wrong, "Write value: null beside valueFrom, or the other way round.")
        if not isinstance(variable.get("value", ""), str):
            yield Problem(f"{place}.env", f"the value of {named} is no text.", "Put it in quotes.")
