"""Runs of the real command in this process, as the tests of the runtime have them."""

from tests.runtime.conftest import _local_room, local  # noqa: F401
