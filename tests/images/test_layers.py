"""The cache of layers has one writer at a time."""

from pathlib import Path

import pytest

from images import layers
from images.system import NotBuildable


def test_a_build_that_waits_too_long_for_another_one_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(layers, "MAX_LOCK_WAIT_SECONDS", 0.3)
    refusal = pytest.raises(NotBuildable, match=rf"{tmp_path}/qwen35/images/lock has been held by another build")
    with layers.locked(), refusal, layers.locked():
        pass
    with layers.locked():  # free again
        pass
