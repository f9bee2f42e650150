"""TLS for the run's own connections between pods, with the certificates of Ray's TLS (spec.pods.tls).

    RAY_USE_TLS, RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT ─► server_context, client_context

Both ends show a certificate of the authority, as between processes of Ray, and the client checks the server's address.
The functions read files, so call them in a thread.
"""

from __future__ import annotations

import os
import ssl


def server_context() -> ssl.SSLContext | None:
    """Return the TLS of connections to this process; None if Ray uses no TLS.

    Raises OSError if a certificate cannot be read or used, and KeyError if a variable with its path is missing.
    """
    return _context(ssl.PROTOCOL_TLS_SERVER) if _is_on() else None


def client_context() -> ssl.SSLContext | None:
    """Return the TLS of connections to other processes of the run; None if Ray uses no TLS.

    Raises the same errors as `server_context`.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT) if _is_on() else None


def _is_on() -> bool:
    """Whether Ray uses TLS, by the values that Ray takes for true (ray/_private/grpc_utils.py)."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _context(purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.load_verify_locations(os.environ["RAY_TLS_CA_CERT"])
    return context
