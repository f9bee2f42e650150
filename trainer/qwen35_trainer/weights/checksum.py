"""The checksum of the bytes of weights."""

from __future__ import annotations

from collections.abc import Buffer

import xxhash


def checksum_of(data: Buffer) -> int:
    """Return the XXH3 checksum of bytes, 64 bits. Other threads can run Python meanwhile.

    Before version 4 of xxhash, its functions that take a single call hold the interpreter's lock, unlike `update`.
    """
    digest = xxhash.xxh3_64()
    digest.update(data)
    return int(digest.intdigest())
