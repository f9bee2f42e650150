"""Checks that every complete manifest in the documents is valid, and that this release can run it."""

import re
from pathlib import Path

import pytest
import yaml

from qwen35_trainer.manifest import ManifestError, parse_manifest
from qwen35_trainer.manifest.release import cannot_run

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _manifests():
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in BLOCK.findall(page.read_text()):
            for document in yaml.safe_load_all(block):
                if isinstance(document, dict) and document.get("kind") == "Qwen35Training":
                    yield pytest.param(document, id=f"{page.relative_to(ROOT)}:{document['metadata']['name']}")


@pytest.mark.parametrize("manifest", list(_manifests()))
def test_a_documented_manifest_is_valid(manifest):
    assert cannot_run(parse_manifest(manifest).spec) == []


def test_the_tutorial_shows_the_problems_that_its_manifest_has_with_two_mistakes():
    text = (ROOT / "docs" / "tutorial.md").read_text()
    wrong = BLOCK.findall(text)[0].replace("updates: 300", "updatez: 300").replace("Threshold: 1.0", "Threshold: 4.0")
    with pytest.raises(ManifestError) as refused:
        parse_manifest(yaml.safe_load(wrong), Path("training.yaml"))
    assert f"$ qwen35 validate training.yaml\n{refused.value}\n" in text
