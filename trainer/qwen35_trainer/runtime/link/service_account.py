"""The pod's access to the API server: address, certificate authority and token, which Kubernetes gives to every pod."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MOUNT_PATH = Path("/var/run/secrets/kubernetes.io/serviceaccount")
HOST_VARIABLE, PORT_VARIABLE = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"


@dataclass(frozen=True)
class ServiceAccount:
    """The credentials of a pod for the API server: address, namespace, token and certificate authority."""

    server: str
    """Address of the API server, in the form https://host:port."""
    folder: Path
    """The folder that contains the files `token` and `ca.crt`."""

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ, folder: Path = MOUNT_PATH) -> "ServiceAccount":
        """Return the service account of this pod.

        Raises KeyError if the variables that Kubernetes sets in pods are missing.
        """
        host, port = environment[HOST_VARIABLE], environment[PORT_VARIABLE]
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}", folder)

    @property
    def token(self) -> str:
        """The bearer token.

        The file is read at each use, because the kubelet replaces it. Raises OSError if that fails.
        """
        return (self.folder / "token").read_text().strip()

    def context(self) -> ssl.SSLContext:
        """Return a TLS context that trusts only the cluster's certificate authority.

        Raises OSError without its certificate.
        """
        return ssl.create_default_context(cafile=self.folder / "ca.crt")
