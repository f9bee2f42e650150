"""Requests to the API server, without a client's machinery: what is sent is what the file says."""

import http.client
import json
import select
import ssl
import threading
import urllib.parse
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.testbed.certificates import Certificate

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Refused(Exception):
    """The API server answered with another status than 2xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Api:
    """The API server as one user sees it. May be used from several threads.

    Each keeps its connection: tests ask all the time, and most of a request is its handshake.
    """

    server: str
    context: ssl.SSLContext
    token: str = ""
    """Bearer token, in the place of a client certificate."""
    kept: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    @classmethod
    def of(cls, server: str, ca: Path, user: Certificate) -> "Api":
        context = ssl.create_default_context(cafile=str(ca))
        context.load_cert_chain(user.certificate, user.key)
        return cls(server, context)

    @classmethod
    def of_token(cls, server: str, ca: Path, token: str) -> "Api":
        return cls(server, ssl.create_default_context(cafile=str(ca)), token)

    def request(self, method: str, path: str, body: Any = None, *, content: str = "application/json") -> Any:
        """The answer's JSON. `body` is bytes, or what becomes JSON. Raises Refused, and OSError when nobody answers."""
        sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self._connection()
        with ExitStack() as unless_answered:
            unless_answered.callback(connection.close)
            headers = {"Content-Type": content, "Accept": "application/json"}
            headers |= {"Authorization": f"Bearer {self.token}"} if self.token else {}
            connection.request(method, path, sent, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            unless_answered.pop_all()
        self.kept.connection = connection
        if answer.status >= 300:
            raise Refused(answer.status, json.loads(text)["message"] if text.startswith("{") else text)
        return json.loads(text)

    def _connection(self) -> http.client.HTTPSConnection:
        """Return the thread's connection, unless the server has closed it: then it is readable before a request."""
        kept: http.client.HTTPSConnection | None = self.kept.__dict__.pop("connection", None)
        if kept is not None and kept.sock is not None and not select.select([kept.sock], [], [], 0)[0]:
            return kept
        if kept is not None:
            kept.close()
        address = urllib.parse.urlsplit(self.server)
        return http.client.HTTPSConnection(str(address.hostname), address.port, context=self.context, timeout=60)

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self.request("POST", path, body)

    def events(self, path: str, query: str = "") -> list[dict[str, Any]]:
        """The events of a watch that the API server ends after a second."""
        connection = self._connection()
        try:
            connection.request(
                "GET", f"{path}?watch=true&timeoutSeconds=1&{query}", headers={"Accept": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(answer.status, text)
        return [json.loads(line) for line in text.splitlines()]

    def apply(self, path: str, document: bytes) -> Any:
        """Server-side apply of one YAML document: client-side apply would not fit these definitions."""
        return self.request(
            "PATCH", f"{path}?fieldManager=testbed&force=true", document, content="application/apply-patch+yaml"
        )

    def define(self, file: Path) -> None:
        """Applies a custom resource definition whose file is named `<group>_<plural>.yaml`."""
        self.apply(f"{DEFINITIONS}/{_definition(file)}", file.read_bytes())

    def defined(self, file: Path) -> bool:
        """Whether the definition is served by now."""
        status = self.get(f"{DEFINITIONS}/{_definition(file)}").get("status", {})
        return is_true(status, "Established")

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except Refused as refused:
            if refused.status != http.client.NOT_FOUND:
                raise
            return False
        return True


def is_true(status: dict[str, Any], kind: str) -> bool:
    """Whether a status has this condition, and it is true."""
    return any(c["type"] == kind and c["status"] == "True" for c in status.get("conditions") or [])


def _definition(file: Path) -> str:
    group, plural = file.stem.split("_")
    return f"{plural}.{group}"
