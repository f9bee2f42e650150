"""What the API server answers when it does not do what was asked."""

from typing import Any


class ApiError(Exception):
    """An answer other than success; `message` is the API server's own."""

    def __init__(self, status: int, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.details = details or {}


class NotFound(ApiError):
    """404: no such object, or no such kind."""


class Conflict(ApiError):
    """409: it exists already, or has changed since it was read."""


class Gone(ApiError):
    """410: the resourceVersion is too old to go on from."""


class Forbidden(ApiError):
    """401 or 403: no permission, or a quota is used up."""


class Invalid(ApiError):
    """400 or 422: the object, or a test of a patch, is refused."""


class Unavailable(ApiError):
    """No answer in time, 429 or 5xx: the same may succeed later. A write may have been carried out all the same."""


def error(status: int, message: str, details: dict[str, Any] | None = None) -> ApiError:
    """The error that stands for a status code."""
    if status == 429 or status >= 500:
        return Unavailable(status, message, details)
    kinds: dict[int, type[ApiError]] = {404: NotFound, 409: Conflict, 410: Gone, 400: Invalid, 422: Invalid}
    kinds |= {401: Forbidden, 403: Forbidden}
    return kinds.get(status, ApiError)(status, message, details)
