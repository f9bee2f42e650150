"""The cache of layers has one writer at a time."""

from pathlib import Path

import pytest

from images import layers
from images.system import NotBuildable


def test_who_waits_longer_for_another_build_than_one_takes_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layers, "LONGEST", 0.3)
    refusal = pytest.raises(NotBuildable, match=rf"{tmp_path}/qwen35/images/lock is held by another build")
    with layers.locked(), refusal, layers.locked():
        pass
    with layers.locked():  # free again
        pass
