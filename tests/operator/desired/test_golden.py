"""The children of whole manifests, as files to read.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/operator/desired/test_golden.py, which fails, and read the difference.
"""

from pathlib import Path

import pytest
import yaml

from qwen35_operator import render
from qwen35_trainer import __version__
from qwen35_trainer.manifest import load_manifest
from tests.operator.golden import compare

HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parents[2] / "examples").glob("*.yaml"))
MANIFESTS = [*EXAMPLES, *sorted((HERE / "manifests").glob("*.yaml"))]


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_the_children_are_those_of_the_golden_file(file):
    # A release must not touch every file: images are named after it.
    text = render.text(render.objects(load_manifest(file))).replace(f":{__version__}\n", ":VERSION\n")
    # The hash in an annotation covers the image too.
    compare(text, HERE / "golden" / file.name, _unhashed)


def test_there_is_no_golden_file_without_its_manifest():
    assert {file.name for file in (HERE / "golden").iterdir()} == {file.name for file in MANIFESTS}


def _unhashed(text: str) -> list[dict]:
    objects = list(yaml.safe_load_all(text))
    for manifest in objects:
        manifest["metadata"].get("annotations", {}).pop("rl.qwen35.io/hash", None)
    return objects
