"""Checks the form of answers with status 200: a proxy in front of the API server may send anything.

Every function raises Unexpected if the answer is not what the Kubernetes API defines. The operator logs and retries this error like
others. Otherwise one such answer, about one namespace, would end the whole operator.
"""

from dataclasses import dataclass
from typing import Any

from qwen35_operator.kube.api_errors import Unexpected
from qwen35_operator.kube.client import JsonObject


@dataclass(frozen=True)
class ListPage:
    """One page of a list."""

    items: list[Any]
    """The objects. Each has at least the fields of `metadata` that every object has. Or what replaced them."""
    version: str
    """The resourceVersion of the list."""
    token: str
    """Requests the next page, as the value of `continue`; empty on the last page."""


def list_item(path: str, raw: Any) -> JsonObject:  # noqa: ANN401  # JSON
    """Return an item of a list if it is an object. path: that of the request, for the error."""
    if not _is_object(raw):
        raise _unexpected(path, "a list of objects", raw)
    return raw  # type: ignore[no-any-return]


def list_page(path: str, answer: JsonObject, *, parsed: bool = False) -> ListPage:
    """Return the page that is the answer to a list.

    path: that of the request, for the error. parsed: whether the items have been replaced by others, after `list_item`.
    """
    metadata, items = answer.get("metadata"), answer.get("items")
    if not isinstance(metadata, dict) or not isinstance(items, list | None):
        raise _unexpected(path, "a list", answer)
    version, token = str(metadata.get("resourceVersion", "")), metadata.get("continue") or ""
    if not version.isdecimal() or not isinstance(token, str) or not (parsed or all(map(_is_object, items or ()))):
        raise _unexpected(path, "a list", answer)
    return ListPage(items or [], version, token)


def plurals(path: str, answer: JsonObject) -> set[str]:
    """Return the plurals of the kinds that an answer about an API group lists. path: that of the request, for the error."""
    resources = answer.get("resources", "")
    if not isinstance(resources, list | None) or not all(isinstance(each, dict) for each in resources or ()):
        raise _unexpected(path, "a list of resources", answer)
    return {str(each.get("name")) for each in resources or ()}


def lease(path: str, answer: JsonObject) -> JsonObject:
    """Return the answer if it is a Lease; its spec may be missing. path: that of the request, for the error."""
    spec = answer.get("spec") or {}
    if not _is_object(answer) or not isinstance(spec, dict) or not isinstance(spec.get("leaseTransitions", 0), int):
        raise _unexpected(path, "a Lease", answer)
    return answer


def watch_event(path: str, line: Any) -> JsonObject:  # noqa: ANN401  # JSON
    """Return a line of a watch as an event, which has a type and an object. path: that of the request, for the error."""
    kind, raw = (line.get("type"), line.get("object")) if isinstance(line, dict) else (None, None)
    valid = isinstance(raw, dict)
    if kind == "BOOKMARK":
        metadata = raw.get("metadata") if isinstance(raw, dict) else None
        valid = isinstance(metadata, dict) and str(metadata.get("resourceVersion")).isdecimal()
    elif kind != "ERROR":
        valid = kind in ("ADDED", "MODIFIED", "DELETED") and _is_object(raw)
    if not valid:
        raise _unexpected(path, "an event", line)
    event: JsonObject = line
    return event


def _is_object(raw: Any) -> bool:  # noqa: ANN401  # JSON
    """Return whether this is an object with the metadata that every object in a namespace has."""
    metadata = raw.get("metadata") if isinstance(raw, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("labels", {}), dict):
        return False
    texts = (metadata.get(name) for name in ("namespace", "name", "uid"))
    return all(isinstance(text, str) for text in texts) and str(metadata.get("resourceVersion")).isdecimal()


def _unexpected(path: str, wanted: str, answer: Any) -> Unexpected:  # noqa: ANN401  # JSON
    message = (
        f"{path}: the answer is not {wanted}, but {str(answer)[:200]}. Check the proxies in front of the API server"
    )
    return Unexpected(200, message)
