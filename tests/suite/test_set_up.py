"""Which requirements `make` installs, and where the small set can be installed."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORMS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_package_of_the_small_set_exists_for_the_platform(platform, tmp_path):
    """Requests only names of files from the package index: nothing is downloaded. torch needs macOS 14."""
    options = ["--dry-run", "--no-deps", "--target", tmp_path, "--python-platform", platform]
    command = ["uv", "pip", "install", *options, "--requirement", ROOT / "requirements" / "laptop.txt"]
    done = subprocess.run(
        command, env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Would install 1\d\d packages", done.stderr)


def _installs(goal: str, environment: Path) -> list[str]:
    """The sets of requirements that `make` would install."""
    command = ["make", "--dry-run", "--directory", ROOT, goal, f"VENV={environment}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"uv pip sync --quiet requirements/(\S+)\.txt", output)


def test_the_demo_installs_the_small_set_and_the_tests_the_full_one(tmp_path):
    assert (_installs("demo", tmp_path), _installs("lint", tmp_path)) == (["laptop"], ["cpu"])


def test_the_demo_uses_what_is_installed_and_the_tests_replace_the_small_set(tmp_path):
    (tmp_path / ".ready-laptop").touch()
    assert (_installs("demo", tmp_path), _installs("lint", tmp_path)) == ([], ["cpu"])


@pytest.mark.parametrize(("stale", "installed"), [(False, []), (True, ["cpu"])])
def test_the_demo_keeps_the_full_set_and_brings_it_up_to_date(tmp_path, stale, installed):
    (tmp_path / ".ready").touch()
    if stale:
        os.utime(tmp_path / ".ready", (0, 0))
    assert (_installs("demo", tmp_path), _installs("lint", tmp_path)) == (installed, installed)


def test_an_installation_that_breaks_off_leaves_no_set_that_seems_installed(tmp_path):
    (tmp_path / ".ready-laptop").touch()
    command = ["make", "--dry-run", "--directory", ROOT, "setup", f"VENV={tmp_path}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    steps = [line.split()[0] for line in lines if line.startswith(("rm -f", "uv", "touch"))]
    assert steps == ["rm", "uv", "uv", "touch"]
    assert f"rm -f {tmp_path}/.ready {tmp_path}/.ready-laptop" in lines
