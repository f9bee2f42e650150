"""How a pod reaches the API server: address, certificate authority and token, as every pod has them."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


@dataclass(frozen=True)
class Account:
    """A pod's service account."""

    server: str
    """https://host:port"""
    folder: Path
    """Holds `token` and `ca.crt`."""

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, folder: Path = MOUNT) -> "Account":
        """The one that Kubernetes gave to this pod. Raises KeyError outside of one."""
        host, port = environment[HOST_VARIABLE], environment[PORT_VARIABLE]
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    @property
    def token(self) -> str:
        """Read at each use, because the kubelet replaces it before it expires. Raises OSError."""
        return (self.folder / "token").read_text().strip()

    def context(self) -> ssl.SSLContext:
        """Trusts the cluster's authority and nobody else. Raises OSError."""
        return ssl.create_default_context(cafile=self.folder / "ca.crt")
