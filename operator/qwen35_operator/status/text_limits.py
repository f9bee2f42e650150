"""Cuts texts to a number of bytes: limits in characters would let a message in Chinese take three times as much of etcd."""

ELLIPSIS = "…"


def cut(text: str, max_bytes: int) -> str:
    """Return the text if it has at most `max_bytes` bytes in UTF-8; otherwise its beginning and an ellipsis, which fit."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(ELLIPSIS.encode())].decode(errors="ignore") + ELLIPSIS
