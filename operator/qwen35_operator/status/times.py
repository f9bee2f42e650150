"""Times in Kubernetes' format."""

from datetime import UTC, datetime


def rfc3339(time: datetime) -> str:
    """Format a time in UTC and whole seconds: 2026-01-02T03:04:05Z."""
    # strftime would write the year 5 with one digit.
    return time.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse(text: str) -> datetime:
    """Parse a time from a status or an object's metadata, in RFC 3339."""
    return datetime.fromisoformat(text)


def seconds_since(text: str, now: datetime) -> float:
    """Return the seconds from the time in `text` until `now`; negative if `text` is in the future."""
    return (now - parse(text)).total_seconds()


def at(unix: float) -> datetime:
    """Return the time in UTC for a Unix timestamp in seconds."""
    return datetime.fromtimestamp(unix, UTC)
