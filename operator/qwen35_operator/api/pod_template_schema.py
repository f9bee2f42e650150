"""The schema of the partial pod templates in spec.pods: head, rollout and train.

It has the fields that people set most often, so that the API server, `kubectl explain` and generated clients know their
types, and two appliers can each own a container. All other fields of a pod template are preserved, and checked by
`desired/pod_overrides` and KubeRay. The whole schema of a pod template has more than a thousand fields; with three of
them, `kubectl apply` could not store the definition in its annotation of at most 256 KiB.

Every field is nullable, except keys of lists: null removes what the operator's template has, and the API server drops
a null from a field that is not nullable. The schema sets no limits on lengths: the whole spec is bounded in bytes
(`MAX_SPEC_BYTES` in kube/trainings.py), and a lower limit would refuse pods that Kubernetes accepts.
"""

from typing import Any, Final

type PodSchema = dict[str, Any]

_PRESERVED: Final = {"x-kubernetes-preserve-unknown-fields": True}
_NULLABLE: Final = {"nullable": True}


def _text(description: str) -> PodSchema:
    return {"type": "string", "description": description} | _NULLABLE


def _seconds(description: str) -> PodSchema:
    return {"type": "integer", "format": "int64", "description": description} | _NULLABLE


def _texts(description: str) -> PodSchema:
    """Return the schema of a map from texts to texts. A null value removes its key from the operator's template."""
    values = {"type": "string"} | _NULLABLE
    return {"type": "object", "description": description, "additionalProperties": values} | _NULLABLE


def _quantities(description: str) -> PodSchema:
    """Return the schema of a map from resources to quantities, such as memory: 64Gi."""
    values = {"x-kubernetes-int-or-string": True} | _NULLABLE
    return {"type": "object", "description": description, "additionalProperties": values} | _NULLABLE


def _fields(description: str, **properties: PodSchema) -> PodSchema:
    """Return the schema of an object with some typed fields, which preserves all others."""
    typed: PodSchema = {"properties": properties} if properties else {}
    return {"type": "object", "description": description} | _PRESERVED | _NULLABLE | typed


def _list(description: str, *keys: str, **properties: PodSchema) -> PodSchema:
    """Return the schema of a list of objects. keys: the fields that identify an item; without them, the list is atomic."""
    items: PodSchema = {"type": "object"} | _PRESERVED
    if keys:
        named = {key: {"type": "string", "description": "Identifies the item in its list."} for key in keys}
        items |= {"required": list(keys), "properties": named | properties}
        kind: PodSchema = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
    else:
        items |= {"properties": properties}
        kind = {"x-kubernetes-list-type": "atomic"}
    return {"type": "array", "description": description, "items": items} | kind | _NULLABLE


def _containers(description: str) -> PodSchema:
    return _list(
        description,
        "name",
        image=_text("Image. The operator sets it for the container ray."),
        env=_list(
            "Environment variables.",
            "name",
            value=_text("Value."),
            valueFrom=_fields("Source of the value."),
        ),
        resources=_fields(
            "Compute resources.",
            limits=_quantities("Maximum of each resource."),
            requests=_quantities("Amount of each resource that is reserved."),
        ),
        securityContext=_fields("Security settings of the container."),
        volumeMounts=_list("Mounted volumes.", "mountPath", name=_text("Name of the volume.")),
    )


POD_TEMPLATE: Final[PodSchema] = {
    "metadata": _fields(
        "Labels and annotations of the pods.",
        labels=_texts("Labels of the pods."),
        annotations=_texts("Annotations of the pods."),
    ),
    "spec": _fields(
        "Specification of the pods.",
        affinity=_fields("Rules about nodes and other pods."),
        containers=_containers("Containers."),
        imagePullSecrets=_list("Secrets for pulling images.", "name"),
        initContainers=_containers("Containers that run before the others."),
        nodeSelector=_texts("Labels that a node must have."),
        priorityClassName=_text("Name of a PriorityClass."),
        runtimeClassName=_text("Name of a RuntimeClass."),
        schedulerName=_text("Name of the scheduler."),
        securityContext=_fields("Security settings of the pods."),
        terminationGracePeriodSeconds=_seconds("Seconds between the signal to end and the kill."),
        tolerations=_list(
            "Taints that the pods tolerate.",
            effect=_text("Effect of the taint. If absent: every effect."),
            key=_text("Key of the taint."),
            operator=_text("Equal or Exists."),
            tolerationSeconds=_seconds("Seconds for which a taint with the effect NoExecute is tolerated."),
            value=_text("Value of the taint."),
        ),
        topologySpreadConstraints=_list("Distribution over nodes.", "topologyKey", "whenUnsatisfiable"),
        volumes=_list("Volumes.", "name"),
    ),
}
"""The typed fields of a partial pod template: the properties of spec.pods.head, spec.pods.rollout and spec.pods.train."""
