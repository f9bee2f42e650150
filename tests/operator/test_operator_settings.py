"""Options of the operator itself."""

import pytest

from qwen35_operator.operator_settings import IMAGES, OperatorSettings, SettingsRefused, images, own_identity


def test_without_changes_every_profile_has_its_image() -> None:
    assert images([]) == IMAGES
    assert set(IMAGES) == {"NVIDIA", "Ascend", "CPU"}
    assert OperatorSettings().images == IMAGES


def test_one_image_can_be_changed_and_the_last_change_counts() -> None:
    chosen = images(["CPU=registry:5000/a/b:1", "NVIDIA=c@sha256:0", "CPU=d=e"])
    assert chosen == {**IMAGES, "CPU": "d=e", "NVIDIA": "c@sha256:0"}
    assert IMAGES["CPU"] != "d=e"


@pytest.mark.parametrize("change", ["TPU=image", "CPU", "CPU=", "=image", "", "cpu=image"])
def test_a_change_that_is_none_names_what_to_write(change) -> None:
    with pytest.raises(SettingsRefused) as caught:
        images([change])
    assert str(caught.value) == f"--image {change}: write PROFILE=IMAGE, with a profile of NVIDIA, Ascend, CPU"


def test_no_two_processes_have_one_identity() -> None:
    assert len({own_identity() for _ in range(100)}) == 100
