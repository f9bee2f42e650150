"""The hashes by which earlier releases started attempts stay the same, so that an upgrade ends none of them."""

import json
from typing import Any

import pytest

from qwen35_operator.api import crd
from qwen35_operator.desired.first_defaults import FIRST_DEFAULTS
from tests.upgrade.recording import RECORDINGS, Recording, recordings
from tests.upgrade.spec_hashes import FILE, hash_of, spec_schema, stored

FOLDERS = sorted(RECORDINGS.iterdir())
HASHES = {folder.name: json.loads((folder / FILE).read_text()) for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_hashes_of_all_recorded_specs_are_reproduced(folder):
    before, now = spec_schema(folder), crd.schema()["properties"]["spec"]
    recorded = HASHES[folder.name]
    assert len({entry["hash"] for entry in recorded.values()}) > len(recorded) / 2
    for name, entry in recorded.items():
        written_then = stored(before, entry["spec"])
        assert hash_of(written_then) == entry["hash"], name
        # The API server adds the defaults of new fields when it reads the object.
        assert hash_of(stored(now, written_then)) == entry["hash"], name


@pytest.mark.parametrize("recording", recordings(), ids=lambda recording: f"{recording.version}-{recording.name}")
def test_the_hash_of_a_recorded_attempt_is_reproduced(recording: Recording):
    jobs = recording.objects["RayJob"]
    assert jobs
    assert {job["metadata"]["annotations"]["rl.qwen35.io/spec-hash"] for job in jobs} == {
        hash_of(recording.training["spec"])
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_first_defaults_are_those_of_the_release_that_had_the_fields(folder):
    """A section's default is {}; its fields have defaults of their own."""
    written: dict[str, Any] = {
        path: schema["default"] for path, schema in crd.fields(spec_schema(folder)) if schema.get("default", {}) != {}
    }
    assert written
    assert {path: FIRST_DEFAULTS[path] for path in written} == written
