"""Errors of requests to the API server: by HTTP status code, and denials of admission policies by their message."""

import re
from typing import Any, Final

DENIED: Final = re.compile(
    'admission webhook "[^"]*" denied the request|[^"]*("[^"]*" )?is forbidden: ValidatingAdmissionPolicy .* denied request'
)
"""Matches the beginning of the message if an admission policy denied a write."""


class ApiError(Exception):
    """The API server answered a request with an error, or not at all."""

    def __init__(
        self, status: int, message: str, details: dict[str, Any] | None = None, retry_after: float = 0.0
    ) -> None:
        """Create the error.

        status: HTTP status code; 0 if there was no answer. message: text of the API server's answer. details: the
        `details` of the Status object in the answer; None if it has none. retry_after: seconds to wait before the next
        request, as the API server requests.
        """
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message
        self.details = details or {}
        self.retry_after = retry_after


class NotFound(ApiError):
    """404: the object, or its kind, does not exist."""


class Conflict(ApiError):
    """409: the object already exists, or has changed since it was read."""


class Gone(ApiError):
    """410: the resourceVersion from which a watch or a list should continue is too old."""


class Forbidden(ApiError):
    """403: a permission is missing, or a quota is used up; or `Denied`."""


class Unauthorized(ApiError):
    """401: the API server does not accept the credentials, for example because their token has expired.

    The reason may pass on its own: the kubelet renews the operator's token, and an authentication webhook comes back.
    """


class Denied(Forbidden):
    """An admission webhook or a ValidatingAdmissionPolicy denied the write.

    The status is what the policy chose. It has no other meaning: a webhook may deny a write with 404, 409, 429 or 500.
    """


class Invalid(ApiError):
    """400 or 422: the object is invalid, or a test operation of a JSON patch has failed."""


class Unexpected(ApiError):
    """The status is 200, but the answer is not what the Kubernetes API defines."""


class TooLarge(ApiError):
    """The answer has more bytes than the operator reads."""


class Unavailable(ApiError):
    """The API server gave no answer in time, or answered 429 or 5xx.

    A retry may succeed. If the request was a write, the API server may have carried it out nevertheless.
    """


def api_error(status: int, message: str, details: dict[str, Any] | None = None, retry_after: float = 0.0) -> ApiError:
    """Return an error of the class that stands for this answer: for its HTTP status code, unless the message is that of a policy."""
    if DENIED.match(message):
        return Denied(status, message, details)
    if status == 429 or status >= 500:
        return Unavailable(status, message, details, retry_after)
    classes: dict[int, type[ApiError]] = {404: NotFound, 409: Conflict, 410: Gone, 400: Invalid, 422: Invalid}
    classes |= {401: Unauthorized, 403: Forbidden}
    return classes.get(status, ApiError)(status, message, details)
