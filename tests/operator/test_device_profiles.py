"""Profiles that fit the rules their pods live under."""

import pytest

from qwen35_operator.device_profiles import PROFILES
from qwen35_operator.operator_settings import IMAGES

EVERY = pytest.mark.parametrize("name", PROFILES)


def test_there_is_a_profile_and_an_image_for_every_kind_of_device():
    assert set(PROFILES) == set(IMAGES)


@EVERY
def test_shared_memory_holds_rays_object_store(name):
    """Ray takes 30% of the memory for it, and goes to a disk when /dev/shm is smaller."""
    for size in (PROFILES[name].head, PROFILES[name].per_device):
        assert 0.3 * size.memory_gib <= size.shm_gib <= 0.5 * size.memory_gib


@EVERY
def test_a_device_has_a_name_in_both_worlds_or_in_none(name):
    assert (PROFILES[name].resource is None) == (PROFILES[name].ray_resource is None)


@EVERY
def test_host_paths_have_names_that_volumes_may_have(name):
    names = [on.name for on in PROFILES[name].host_paths]
    assert len(names) == len(set(names))
    assert not {"shm", "run", "config"} & set(names)
    assert all(on.path.startswith("/") for on in PROFILES[name].host_paths)


@EVERY
def test_no_profile_sets_what_the_operator_sets(name):
    assert not any(variable.startswith(("QWEN35_", "RAY_")) for variable in PROFILES[name].environment)
