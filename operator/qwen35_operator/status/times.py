"""Times in Kubernetes' format."""

from datetime import UTC, datetime


def rfc3339(time: datetime) -> str:
    """Format a time in UTC and whole seconds: 2026-01-02T03:04:05Z."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> datetime:
    """Parse a time of a status or of an object's metadata."""
    return datetime.fromisoformat(text)


def seconds_since(text: str, now: datetime) -> float:
    """Seconds from the time in `text` until `now`; negative if it is in the future."""
    return (now - parse(text)).total_seconds()


def at(unix: float) -> datetime:
    """Return the time of a Unix timestamp in seconds."""
    return datetime.fromtimestamp(unix, UTC)
