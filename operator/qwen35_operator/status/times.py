"""Times as Kubernetes writes them."""

from datetime import UTC, datetime


def rfc3339(time: datetime) -> str:
    """UTC, whole seconds: 2026-01-02T03:04:05Z."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(text: str) -> datetime:
    """The time in a status or in an object's metadata."""
    return datetime.fromisoformat(text)


def seconds_since(text: str, now: datetime) -> float:
    """Seconds from the time in the text until now; negative when it is to come."""
    return (now - parse(text)).total_seconds()


def at(unix: float) -> datetime:
    """The time of Unix seconds."""
    return datetime.fromtimestamp(unix, UTC)
