"""Archives are what the Open Container Initiative says, and the same from the same files."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from images.archive import Layer, described, recalled, write_archive, write_layer

NAME = "example.test/tiny:1"
CONFIG = {"Entrypoint": ["/hello"], "User": "1000:1000"}


@pytest.fixture
def layer(tmp_path: Path) -> Layer:
    return write_layer(tree(tmp_path / "root"), tmp_path / "layer.tar", {"/home/me": 1000})


def tree(root: Path) -> Path:
    (root / "home" / "me").mkdir(parents=True)
    (root / "hello").write_text("#!/bin/sh\n")
    (root / "hello").chmod(0o755)
    (root / "link").symlink_to("hello")
    return root


def members(layer: Layer) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(layer.file) as packed:
        return {member.name: member for member in packed}


def blobs(*layers: Layer, **options: Any) -> dict[str, bytes]:
    out = io.BytesIO()
    write_archive(out, NAME, layers, CONFIG, **options)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as packed:
        return {member.name: packed.extractfile(member).read() for member in packed}


def test_a_layer_keeps_modes_and_links_and_is_roots_but_for_what_is_given_away(layer: Layer):
    members_by_name = members(layer)
    assert members_by_name.keys() == {"home", "home/me", "hello", "link"}
    assert members_by_name["hello"].mode == 0o755
    assert members_by_name["link"].linkname == "hello"
    assert {name: member.uid for name, member in members_by_name.items() if member.uid} == {"home/me": 1000}


def test_the_same_files_make_the_same_layer_whenever_they_were_written(layer: Layer, tmp_path: Path):
    again = tree(tmp_path / "again")
    os.utime(again / "hello", (1, 1))
    assert write_layer(again, tmp_path / "again.tar", {"/home/me": 1000}).digest == layer.digest


def test_digest_and_size_are_the_files(layer: Layer):
    assert hashlib.sha256(layer.file.read_bytes()).hexdigest() == layer.digest
    assert layer.file.stat().st_size == layer.size


def test_a_layer_is_recalled_from_its_description(layer: Layer):
    assert recalled(layer.file.parent, json.loads(json.dumps(described(layer)))) == layer


def test_everything_in_an_archive_is_named_by_its_digest_and_leads_to_the_layers(layer: Layer):
    blobs_by_name = blobs(layer)
    for name, content in blobs_by_name.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(content).hexdigest()}"
    (entry,) = json.loads(blobs_by_name["index.json"])["manifests"]
    assert entry["annotations"]["io.containerd.image.name"] == NAME
    manifest = json.loads(blobs_by_name[path(entry)])
    config = json.loads(blobs_by_name[path(manifest["config"])])
    assert config["config"] == CONFIG
    assert (
        config["rootfs"]["diff_ids"]
        == [layer_entry["digest"] for layer_entry in manifest["layers"]]
        == [f"sha256:{layer.digest}"]
    )
    assert blobs_by_name[path(manifest["layers"][0])] == layer.file.read_bytes()


def test_layers_that_the_reader_has_are_named_and_not_sent(layer: Layer):
    whole, thin = blobs(layer), blobs(layer, present=[layer])
    assert whole.keys() - thin.keys() == {f"blobs/sha256/{layer.digest}"}
    assert whole["index.json"] == thin["index.json"]


def path(reference: dict[str, Any]) -> str:
    return f"blobs/{reference['digest'].replace(':', '/')}"
