"""Reads YAML as kubectl does.

PyYAML alone differs: it reads 1e-6 as a string, 2026-01-01 as a date and 1:30 as 90, and silently keeps the last of two equal
keys. A manifest must mean the same here as in the cluster.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

from qwen35_trainer.manifest.problems import Problem

TAG = "tag:yaml.org,2002:"
# Tag, pattern of its scalars (YAML 1.1, as Go's yaml package reads it), and the characters that such a scalar may begin with.
SCALARS = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"[yY]|yes|Yes|YES|true|True|TRUE|on|On|ON|[nN]|no|No|NO|false|False|FALSE|off|Off|OFF", "yYtToOnNfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o?[0-7]+|0b[01]+)", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """Loads safe YAML.

    Scalars have the types in SCALARS. A key that occurs twice, or is read as a boolean, is an error.
    """

    bool_values = yaml.SafeLoader.bool_values | {"y": True, "n": False}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{TAG}merge":
                continue
            wrong = "is read as a boolean, quote it" if key.tag == f"{TAG}bool" else "is written twice"
            if key.tag == f"{TAG}bool" or key.value in seen:
                reason = f"the key {key.value} {wrong}"
                raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
            seen.add(key.value)
            key.tag = f"{TAG}str"  # JSON allows only strings as keys
        return super().construct_mapping(node, deep)


class _Dumper(yaml.CSafeDumper):
    """Dumps safe YAML without anchors, and quotes strings that `_Loader` would read as another type.

    It uses libyaml, which every wheel of PyYAML includes, because it is fast and an operator writes thousands of manifests.
    """

    def ignore_aliases(self, data: object) -> bool:
        return True


# Without this, PyYAML would try its own patterns first.
_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in SCALARS:
    _signs = [*_first, ""] if _tag == "null" else list(_first)
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(f"{TAG}{_tag}", re.compile(rf"^(?:{_pattern})$"), _signs)


def parse_value(text: str) -> object:
    """Parse one YAML value. Raises yaml.YAMLError if the text is not valid YAML."""
    return yaml.load(text, _Loader)  # noqa: S506, a SafeLoader


def parse_document(text: str) -> tuple[object, list[Problem]]:
    """Parse YAML text that must contain exactly one document.

    Returns (document, []). If the text is not valid YAML or has another number of documents, returns (None, problems).
    """
    try:
        documents = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except yaml.YAMLError as error:
        return None, [_problem(error, text)]
    except RecursionError:
        return None, [Problem("", "lists and mappings are nested too deeply.", "Remove levels of nesting.")]
    if not documents:
        return None, [Problem("", "the file is empty.", "Write one Qwen35Training into it.")]
    if len(documents) > 1:
        kinds = [f"{i}: {_name(document)}" for i, document in enumerate(documents, 1)]
        message = f"there are {len(documents)} documents ({', '.join(kinds)})."
        return None, [Problem("", message, "Keep one document in a file.")]
    return documents[0], []


def dump_document(document: object) -> str:
    """Return a document as YAML text. The order of keys is kept."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _problem(error: yaml.YAMLError, text: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return Problem("", f"this is not valid YAML: {error}.", "Save the file as UTF-8 text.")
    lines = text.splitlines()
    line = lines[mark.line].strip() if mark.line < len(lines) else ""
    reason = getattr(error, "problem", None) or "not understood"
    return Problem(
        "", f"line {mark.line + 1}, column {mark.column + 1}: {reason}.", f"The line: {line or 'end of file'}"
    )


def _name(document: object) -> str:
    if not isinstance(document, dict):
        return type(document).__name__
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{document.get('kind', 'no kind')} {name or ''}".strip()
