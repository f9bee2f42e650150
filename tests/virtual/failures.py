"""Refusals of the API server."""

from typing import Any

REASONS = {400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid"}


class Failure(Exception):
    """A request that the API server does not carry out."""

    def __init__(self, code: int, message: str, *, reason: str | None = None, **details: Any) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason or REASONS.get(code, "")
        self.details = details

    @property
    def body(self) -> dict[str, Any]:
        """The Status object that the client gets."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }
