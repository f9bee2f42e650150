"""Options of the operator itself."""

import pytest

from qwen35_operator.settings import IMAGES, Settings, SettingsRefused, images, own_identity


def test_without_changes_every_profile_has_its_image() -> None:
    assert images([]) == IMAGES
    assert set(IMAGES) == {"nvidia", "ascend", "cpu"}
    assert Settings().images == IMAGES


def test_one_image_can_be_changed_and_the_last_change_counts() -> None:
    chosen = images(["cpu=registry:5000/a/b:1", "nvidia=c@sha256:0", "cpu=d=e"])
    assert chosen == {**IMAGES, "cpu": "d=e", "nvidia": "c@sha256:0"}
    assert IMAGES["cpu"] != "d=e"


@pytest.mark.parametrize("change", ["tpu=image", "cpu", "cpu=", "=image", "", "CPU=image"])
def test_a_change_that_is_none_names_what_to_write(change) -> None:
    with pytest.raises(SettingsRefused) as caught:
        images([change])
    assert str(caught.value) == f"--image {change}: write PROFILE=IMAGE, with a profile of nvidia, ascend, cpu"


def test_no_two_processes_have_one_identity() -> None:
    assert len({own_identity() for _ in range(100)}) == 100
