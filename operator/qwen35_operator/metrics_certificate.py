"""The certificate with which the metrics are served over HTTPS: files of a Secret of type kubernetes.io/tls."""

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from qwen35_operator.operator_settings import SettingsRefused

logger = logging.getLogger(__name__)

CERTIFICATE_FILE: Final = "tls.crt"
KEY_FILE: Final = "tls.key"
RELOAD_SECONDS: Final = 60.0
"""Interval at which the files are read again: a certificate that was renewed serves the connections that begin after this time."""


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return the TLS context with the certificate in this folder. Raises SettingsRefused if it cannot be used."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        _load(context, folder)
    except OSError as error:  # ssl.SSLError is one
        fix = f"It needs {CERTIFICATE_FILE} and {KEY_FILE}, as in a Secret of type kubernetes.io/tls"
        raise SettingsRefused(f"--metrics-certificate {folder}: {error}. {fix}") from error
    return context


async def keep_current(context: ssl.SSLContext, folder: Path) -> None:
    """Read the certificate again every RELOAD_SECONDS, until cancelled. If this fails, the previous one stays in use."""
    while True:
        await asyncio.sleep(RELOAD_SECONDS)
        try:
            _load(context, folder)
        except OSError as error:
            logger.warning("The metrics keep their certificate, because %s cannot be read: %s", folder, error)


def _load(context: ssl.SSLContext, folder: Path) -> None:
    """Load the certificate in a folder into a context. Raises OSError, and leaves the context as it is, if that fails."""
    files = folder / CERTIFICATE_FILE, folder / KEY_FILE
    # OpenSSL drops the key of a context when the certificate of another key is loaded into it.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files)
    context.load_cert_chain(*files)
