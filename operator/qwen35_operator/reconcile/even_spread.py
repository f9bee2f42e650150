"""Spreads over some time what every training needs at the same moment, for example when a process begins to lead."""

import zlib


def fraction(key: str) -> float:
    """Return a number from 0 to less than 1 that depends only on the key. Those of keys with different uids are evenly spread."""
    return zlib.crc32(key.encode()) / 2**32
