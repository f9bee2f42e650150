"""Finds the kubeconfig, and checks it first, because the errors of the client library do not say what is invalid in a file.

The credentials come from the first of these: --kubeconfig and --context, KUBECONFIG, the pod in which this process runs,
~/.kube/config. This is the order of controller-runtime (pkg/client/config).
"""

import os
from pathlib import Path

import yaml

LISTS = ("clusters", "contexts", "users")
IN_POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""Environment variable that Kubernetes sets in every container: its presence shows that this process runs in a pod."""


def uses_pod(kubeconfig: str | None, context: str | None = None) -> bool:
    """Return whether the credentials are those of the pod in which this process runs.

    kubeconfig, context: the values of --kubeconfig and --context; None: the option is not given.
    """
    chosen = kubeconfig or context or os.environ.get("KUBECONFIG")
    return not chosen and IN_POD_VARIABLE in os.environ


def files(kubeconfig: str | None) -> list[Path]:
    """Return the files that kubectl would read: `kubeconfig`, otherwise those of KUBECONFIG, otherwise ~/.kube/config."""
    paths = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    return [Path(path).expanduser() for path in paths.split(os.pathsep) if path]


def problem(kubeconfig: str | None) -> str | None:
    """Return an error message about the first invalid kubeconfig, or None if every file that exists is valid.

    kubeconfig: path of the file; None for the files that kubectl would read.
    """
    for file in files(kubeconfig):
        if file.is_file() and (fault := _fault(file)) is not None:
            return f"{file} is not a valid kubeconfig: {fault}. Name another one with --kubeconfig, or set KUBECONFIG"
    return None


def _fault(file: Path) -> str | None:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        return f"it is not valid YAML ({' '.join(str(error).split())[:200]})"
    if not isinstance(content, dict):
        return "it is empty" if content is None else "it holds no fields"
    for name in LISTS:
        entries = content.get(name) or []
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and "name" in entry for entry in entries):
            return f"{name} is not a list of entries with names"
        kind = name.removesuffix("s")
        if nameless := [entry["name"] for entry in entries if not isinstance(entry.get(kind), dict)]:
            return f"{nameless[0]!r} of {name} has no field {kind}"
    return None
