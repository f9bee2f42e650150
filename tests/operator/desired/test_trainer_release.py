"""Which image the pods of an attempt run, and by which name it can be pulled again."""

from importlib.metadata import version

import pytest

from qwen35_operator.desired.trainer_release import RAY_VERSION, by_digest, present
from qwen35_operator.operator_settings import OperatorSettings

SETTINGS = OperatorSettings(images={"NVIDIA": "house:2", "Ascend": "a", "CPU": "c"})
DIGEST = "sha256:" + "0" * 64


def test_the_image_is_the_trainings_or_else_the_profiles(make_training):
    assert present(make_training({"pods.image": "mine:1"}), SETTINGS).image == "mine:1"
    release = present(make_training(), SETTINGS)
    assert (release.reference, release.image, release.ray_version) == ("house:2", "house:2", RAY_VERSION)
    assert version("ray") == RAY_VERSION


@pytest.mark.parametrize(
    ("image", "image_id", "pulled"),
    [
        ("ghcr.io/q/t:1", f"ghcr.io/q/t@{DIGEST}", f"ghcr.io/q/t@{DIGEST}"),
        ("ghcr.io/q/t", f"docker-pullable://ghcr.io/q/t@{DIGEST}", f"ghcr.io/q/t@{DIGEST}"),
        ("localhost:5000/t:1", f"localhost:5000/t@{DIGEST}", f"localhost:5000/t@{DIGEST}"),
        ("registry:5000/t", f"registry:5000/t@{DIGEST}", f"registry:5000/t@{DIGEST}"),
        ("q/t:1", f"docker.io/q/t@{DIGEST}", f"q/t@{DIGEST}"),
        ("t:1", f"docker.io/library/t@{DIGEST}", f"t@{DIGEST}"),
    ],
)
def test_a_pulled_image_is_named_by_its_digest(image, image_id, pulled):
    assert by_digest(image, image_id) == pulled


@pytest.mark.parametrize(
    ("image", "image_id"),
    [
        ("ghcr.io/q/t:1", ""),
        ("ghcr.io/q/t:1", DIGEST),
        ("ghcr.io/q/t:1", f"docker://{DIGEST}"),
        ("ghcr.io/q/t:1", f"docker.io/library/import-2026-01-01@{DIGEST}"),
        ("ghcr.io/q/t:1", f"mirror.example/q/t@{DIGEST}"),
        (f"ghcr.io/q/t@{DIGEST}", "ghcr.io/q/t@sha256:" + "1" * 64),
        ("ghcr.io/q/t:1", "ghcr.io/q/t@garbage"),
    ],
)
def test_an_image_that_was_loaded_into_the_node_or_has_a_digest_keeps_its_name(image, image_id):
    assert by_digest(image, image_id) == image
