"""Lines of a text that comes in chunks."""

from collections.abc import AsyncIterator


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield whole lines of any length, each with its line break. The last line may have none."""
    parts: list[bytes] = []
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*parts, end, b"\n"))
            parts.clear()
        parts.append(rest)
    if last := b"".join(parts):
        yield last
