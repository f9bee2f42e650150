"""Checks labels, annotations and selectors of a merged pod template.

The API server does not check them in the pod template of a RayJob, but later refuses every pod with an invalid label,
annotation or selector. The rules are those of k8s.io/apimachinery/pkg/util/validation (IsQualifiedName,
IsValidLabelValue).
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from qwen35_operator.desired.problem_limits import field_of
from qwen35_trainer.manifest import Problem

_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PART: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
VALUE: Final = re.compile(f"({_NAME})?")
KEY: Final = re.compile(rf"((?P<prefix>{_PART}(\.{_PART})*)/)?{_NAME}")
MAX_PREFIX_LENGTH: Final = 253
MAX_ANNOTATION_BYTES: Final = 256 * 1024
"""Maximum size of all annotations of one object together, including their keys."""

VALUE_FIX: Final = "Use at most 63 letters, digits, -, _ and ., the first and the last a letter or digit."
KEY_FIX: Final = f"Write name or prefix/name, the prefix a DNS name in lower case. For the name: {VALUE_FIX}"


def problems(template: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Yield a problem for each invalid label key or value in a merged pod template.

    Such keys and values are in labels, annotations, node selectors, tolerations, affinities and topology spread
    constraints. place: the field of the manifest with the user's change, such as spec.pods.head.
    """
    metadata, spec = template["metadata"], template["spec"]
    yield from _labels(metadata["labels"], f"{place}.metadata.labels")
    yield from _annotations(metadata.get("annotations", {}), f"{place}.metadata.annotations")
    yield from _labels(spec.get("nodeSelector", {}), f"{place}.spec.nodeSelector")
    for index, toleration in enumerate(spec.get("tolerations", ())):
        yield from _toleration(toleration, f"{place}.spec.tolerations[{index}]")
    for name in ("affinity", "topologySpreadConstraints"):
        yield from _selectors(spec.get(name), f"{place}.spec.{name}")


def _labels(labels: object, place: str) -> Iterator[Problem]:
    for key, value in labels.items() if isinstance(labels, Mapping) else ():
        yield from _key(key, field_of(place, key))
        yield from _value(value, field_of(place, key))


def _annotations(annotations: Mapping[str, str], place: str) -> Iterator[Problem]:
    for key in annotations:
        yield from _key(key.lower(), field_of(place, key))
    if (size := sum(len(text.encode()) for pair in annotations.items() for text in pair)) > MAX_ANNOTATION_BYTES:
        yield Problem(
            place, f"{size} bytes are more than {MAX_ANNOTATION_BYTES}.", "Put large values into a ConfigMap."
        )


def _toleration(toleration: Mapping[str, Any], place: str) -> Iterator[Problem]:
    key, value = toleration.get("key"), toleration.get("value")
    exists = toleration.get("operator") == "Exists"
    if key:
        yield from _key(key, f"{place}.key")
    elif not exists:
        yield Problem(
            f"{place}.key", "is missing.", "Add the taint's key, or operator: Exists, which tolerates every taint."
        )
    if value and exists:
        yield Problem(f"{place}.value", f"{json.dumps(value)} next to operator: Exists.", "Remove it, or the operator.")
    else:
        yield from _value(value, f"{place}.value")


def _selectors(value: object, place: str) -> Iterator[Problem]:
    """Yield a problem for each invalid label key or value in an affinity or in topology spread constraints.

    value: the affinity, the constraints, or a part of them at any depth. place: the path of `value` in the manifest.
    """
    if isinstance(value, list):
        for index, inside in enumerate(value):
            if isinstance(inside, Mapping | list):
                yield from _selectors(inside, f"{place}[{index}]")
    for name, inside in value.items() if isinstance(value, Mapping) else ():
        here = field_of(place, name)
        if name == "matchLabels":
            yield from _labels(inside, here)
        elif name == "topologyKey":
            yield from _key(inside, here)
        else:
            if name == "matchExpressions":
                yield from _expressions(inside, here)
            yield from _selectors(inside, here)


def _expressions(value: object, place: str) -> Iterator[Problem]:
    for index, expression in enumerate(value if isinstance(value, list) else ()):
        if isinstance(expression, Mapping):
            yield from _key(expression.get("key"), f"{place}[{index}].key")
            values = expression.get("values")
            for position, item in enumerate(values if isinstance(values, list) else ()):
                yield from _value(item, f"{place}[{index}].values[{position}]")


def _key(key: object, place: str) -> Iterator[Problem]:
    """Yield a problem if the key of a label or annotation is invalid. place: the path of the key in the manifest.

    A key that is not a string needs no check here: the schema of RayJobs already refuses it.
    """
    if isinstance(key, str):
        match = KEY.fullmatch(key)
        if match is None or len(match["prefix"] or "") > MAX_PREFIX_LENGTH:
            yield Problem(place, f"{json.dumps(key)} is not a valid label key.", KEY_FIX)


def _value(value: object, place: str) -> Iterator[Problem]:
    if isinstance(value, str) and not VALUE.fullmatch(value):
        yield Problem(place, f"{json.dumps(value)} is not a valid label value.", VALUE_FIX)
