"""Creates a certificate authority for the test bed with the `openssl` command, and the kubeconfigs that use it."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DAYS = 30
ADMINISTRATORS = "system:masters"
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True)
class Certificate:
    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates that the API server believes: the common name is the user, organizations are the groups."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> "Authority":
        folder.mkdir(parents=True)
        authority = cls(folder)
        extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign"]
        _request("/CN=testbed", authority._files("ca"), [*extensions, "subjectKeyIdentifier=hash"])
        return authority

    @property
    def ca(self) -> Path:
        return self._files("ca").certificate

    def issue(self, name: str, user: str, groups: Sequence[str] = (), *, names: str = "") -> Certificate:
        """A certificate for clients and, when `names` has some (`IP:127.0.0.1,DNS:localhost`), for servers."""
        extensions = [
            "basicConstraints=critical,CA:FALSE",
            "keyUsage=critical,digitalSignature",
            "extendedKeyUsage=serverAuth,clientAuth",
            "authorityKeyIdentifier=keyid",
            *([f"subjectAltName={names}"] if names else []),
        ]
        subject = "".join(f"/O={_escape(group)}" for group in groups) + f"/CN={_escape(user)}"
        files, ca = self._files(name), self._files("ca")
        _request(subject, files, extensions, "-CA", str(ca.certificate), "-CAkey", str(ca.key))
        return files

    def key_pair(self, name: str) -> tuple[Path, Path]:
        """A bare key and its public half, as the API server wants for service account tokens."""
        key, public = self.folder / f"{name}.key", self.folder / f"{name}.pub"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        _openssl("pkey", "-in", str(key), "-pubout", "-out", str(public))
        return key, public

    def _files(self, name: str) -> Certificate:
        return Certificate(self.folder / f"{name}.crt", self.folder / f"{name}.key")


def write_kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    """A kubeconfig of one context (JSON is YAML too)."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": "testbed", "user": user}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": "testbed"}}],
        "current-context": "testbed",
    }
    path.write_text(json.dumps(content, indent=2))
    return path


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("/", "\\/")


def _request(subject: str, files: Certificate, extensions: Sequence[str], *signer: str) -> None:
    # /dev/null: the system's configuration would add extensions of its own.
    command = ["req", "-x509", "-config", "/dev/null", *NEW_KEY, "-days", str(DAYS), "-subj", subject, *signer]
    command += ["-keyout", str(files.key), "-out", str(files.certificate)]
    _openssl(*command, *(word for extension in extensions for word in ("-addext", extension)))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {' '.join(arguments)} failed (3.0 or newer is needed):\n{done.stderr}")
