"""Cuts texts to a number of bytes. A limit in characters would not bound the bytes: a Chinese character takes three."""

ELLIPSIS = "…"


def cut(text: str, max_bytes: int) -> str:
    """Return the text, cut so that it has at most `max_bytes` bytes in UTF-8. A cut text ends in an ellipsis."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(ELLIPSIS.encode())].decode(errors="ignore") + ELLIPSIS
