"""A small valid manifest, and ways to change it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen35_trainer.manifest.document import dump_document

SMALL: dict[str, Any] = {
    "apiVersion": "rl.qwen35.io/v1alpha1",
    "kind": "Qwen35Training",
    "metadata": {"name": "tiny"},
    "spec": {
        "accelerator": {"profile": "CPU", "devicesPerNode": 2},
        "model": {"name": "tiny", "source": {"random": {}}},
        "data": {"train": [{"name": "sums", "gym": {"task": "basic_arithmetic", "size": 64}}]},
        "rewards": [{"type": "Gym"}],
        "rollout": {"engine": "Torch"},
        "train": {"updates": 10, "batch": {"promptsPerUpdate": 4}},
    },
}
REMOVED = object()


def set_at(document: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    here: Any = document
    for key in parents:
        here = here[int(key)] if key.isdigit() else here.setdefault(key, {})
    if value is REMOVED:
        here.pop(last, None)
    else:
        here[int(last) if last.isdigit() else last] = value


@pytest.fixture
def removed() -> object:
    """The value that takes a field out."""
    return REMOVED


@pytest.fixture
def document() -> Callable[..., dict[str, Any]]:
    """document({"train.nodes": 2}) is the small manifest with spec.train.nodes 2."""

    def build(changes: dict[str, object] | None = None) -> dict[str, Any]:
        built = copy.deepcopy(SMALL)
        for path, value in (changes or {}).items():
            set_at(built["spec"], path, value)
        return built

    return build


@pytest.fixture
def written(tmp_path: Path, document: Callable[..., dict[str, Any]]) -> Callable[..., Path]:
    """written({...}) is the path of such a manifest."""

    def write(changes: dict[str, object] | None = None) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(dump_document(document(changes)))
        return path

    return write


def segments(path: str) -> list[str | int]:
    """The names and indexes of a path such as `rewards[].weight`; each index is 0."""
    return [0 if part == "[]" else part for part in path.replace("[]", ".[]").split(".")]
