"""What labels, their keys and what selects by them may look like, wherever a merged pod template has them.

A RayJob is admitted with any text there; each of its pods would be refused. The rules are those of
k8s.io/apimachinery/pkg/util/validation (IsQualifiedName, IsValidLabelValue); a key beyond them selects nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from qwen35_trainer.spec import Problem

_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PART: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
VALUE: Final = re.compile(f"({_NAME})?")
KEY: Final = re.compile(rf"((?P<prefix>{_PART}(\.{_PART})*)/)?{_NAME}")
LONGEST_PREFIX: Final = 253
LARGEST: Final = 256 * 1024
"""Bytes of all annotations, keys included."""

VALUE_FIX: Final = "Use at most 63 letters, digits, -, _ and ., the first and the last a letter or digit."
KEY_FIX: Final = f"Write name or prefix/name, the prefix a DNS name in lower case. For the name: {VALUE_FIX}"


def problems(template: Mapping[str, Any], place: str) -> Iterator[Problem]:
    """Every key and value that is none. `place` is where the change is in the manifest."""
    metadata, spec = template["metadata"], template["spec"]
    yield from _labels(metadata["labels"], f"{place}.metadata.labels")
    yield from _annotations(metadata.get("annotations", {}), f"{place}.metadata.annotations")
    yield from _labels(spec.get("nodeSelector", {}), f"{place}.spec.nodeSelector")
    for index, toleration in enumerate(spec.get("tolerations", ())):
        yield from _toleration(toleration, f"{place}.spec.tolerations[{index}]")
    for name in ("affinity", "topologySpreadConstraints"):
        yield from _selectors(spec.get(name), f"{place}.spec.{name}")


def _labels(given: object, place: str) -> Iterator[Problem]:
    for key, value in given.items() if isinstance(given, Mapping) else ():
        yield from _key(key, f"{place}.{key}")
        yield from _value(value, f"{place}.{key}")


def _annotations(given: Mapping[str, str], place: str) -> Iterator[Problem]:
    for key in given:
        yield from _key(key.lower(), f"{place}.{key}")
    if (size := sum(len(text.encode()) for pair in given.items() for text in pair)) > LARGEST:
        yield Problem(place, f"{size} bytes are more than {LARGEST}.", "Put what is large into a ConfigMap.")


def _toleration(given: Mapping[str, Any], place: str) -> Iterator[Problem]:
    key, value, exists = given.get("key"), given.get("value"), given.get("operator") == "Exists"
    if key:
        yield from _key(key, f"{place}.key")
    elif not exists:
        yield Problem(
            f"{place}.key", "is missing.", "Add the taint's key, or operator: Exists, which tolerates every taint."
        )
    if value and exists:
        yield Problem(f"{place}.value", f"{json.dumps(value)} beside operator: Exists.", "Remove it, or the operator.")
    else:
        yield from _value(value, f"{place}.value")


def _selectors(given: object, place: str) -> Iterator[Problem]:
    """In affinities and spread constraints, wherever they are: nodes and pods are selected in the same words."""
    if isinstance(given, list):
        for index, inside in enumerate(given):
            yield from _selectors(inside, f"{place}[{index}]")
    for name, inside in given.items() if isinstance(given, Mapping) else ():
        here = f"{place}.{name}"
        if name == "matchLabels":
            yield from _labels(inside, here)
        elif name == "topologyKey":
            yield from _key(inside, here)
        else:
            if name == "matchExpressions":
                yield from _expressions(inside, here)
            yield from _selectors(inside, here)


def _expressions(given: object, place: str) -> Iterator[Problem]:
    for index, one in enumerate(given if isinstance(given, list) else ()):
        if isinstance(one, Mapping):
            yield from _key(one.get("key"), f"{place}[{index}].key")
            values = one.get("values")
            for at, value in enumerate(values if isinstance(values, list) else ()):
                yield from _value(value, f"{place}[{index}].values[{at}]")


def _key(key: object, place: str) -> Iterator[Problem]:
    """What is no text at all is for the API server to refuse: the RayJob has a schema for that."""
    if isinstance(key, str):
        match = KEY.fullmatch(key)
        if match is None or len(match["prefix"] or "") > LONGEST_PREFIX:
            yield Problem(place, f"{json.dumps(key)} is no key of a label.", KEY_FIX)


def _value(value: object, place: str) -> Iterator[Problem]:
    if isinstance(value, str) and not VALUE.fullmatch(value):
        yield Problem(place, f"{json.dumps(value)} is no value of a label.", VALUE_FIX)
