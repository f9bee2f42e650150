"""Spreads over some time what every training needs at the same moment, for example when a process begins to lead."""

import zlib


def share(key: str) -> float:
    """Return a number from 0 to less than 1 that depends only on a key with a training's uid. Those of many are evenly spread."""
    return zlib.crc32(key.encode()) / 2**32
