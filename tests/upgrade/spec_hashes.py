"""Hashes of specs by which releases start attempts, for the releases that must compute the same: recordings/<version>/spec_hashes.json.

`python -m tests.upgrade.record` writes them. The specs are the examples, and one change of every field
(tests/controlplane/test_changes.py) that the recording's definition has.
"""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from qwen35_operator.api.training_resource import TrainingResource
from qwen35_operator.desired.spec_hash import spec_hash
from qwen35_trainer.manifest import parse_spec
from tests.controlplane.test_changes import CHANGES, SPEC, merge_patch
from tests.upgrade.recording import DEFINITION
from tests.virtual.defaults import schema_of, with_defaults
from tests.virtual.patches import MERGE_PATCH, patched

FILE = "spec_hashes.json"
EXAMPLES = Path(__file__).parents[2] / "examples"

type Spec = dict[str, Any]


def write(folder: Path) -> None:
    """Write the hashes of this version into the folder of its recording."""
    schema = spec_schema(folder)
    hashes = {name: {"hash": hash_of(stored(schema, spec)), "spec": spec} for name, spec in _specs(schema)}
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in hashes.items())
    (folder / FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def spec_schema(folder: Path) -> Mapping[str, Any]:
    """Return the schema of the spec in a recording's definition."""
    return dict(schema_of(folder / DEFINITION)["properties"]["spec"])


def stored(schema: Mapping[str, Any], spec: Spec) -> Spec:
    """Return a spec as the API server stores it: with all defaults of the schema."""
    return dict(with_defaults(schema, deepcopy(spec)))


def hash_of(spec: Spec) -> str:
    """Return this version's hash of a stored spec, whose fields need not fit together. Raises ValueError if a field is invalid."""
    parsed, problems = parse_spec(spec, new=False)
    if parsed is None:
        raise ValueError(str(problems))
    return spec_hash(TrainingResource("demo", "team", "u", 1, parsed))


def _specs(schema: Mapping[str, Any]) -> Iterator[tuple[str, Spec]]:
    for file in sorted(EXAMPLES.glob("*.yaml")):
        spec = yaml.safe_load(file.read_text())["spec"]
        if _is_known(schema, spec):
            yield file.name, spec
    yield "the smallest", SPEC
    for path, (value, _) in CHANGES.items():
        spec = patched({"spec": SPEC}, merge_patch(path, value), MERGE_PATCH)["spec"]
        if _is_known(schema, spec):
            yield path, spec


def _is_known(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether the schema has all fields of the value."""
    if isinstance(value, list):
        return all(_is_known(schema.get("items", {}), item) for item in value)
    if not isinstance(value, Mapping) or "properties" not in schema:
        return True
    inside = schema["properties"]
    return all(name in inside and _is_known(inside[name], item) for name, item in value.items())
