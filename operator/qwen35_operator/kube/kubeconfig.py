"""Checks kubeconfig files before the client library reads them, whose errors do not say what is wrong with an invalid one."""

import os
from pathlib import Path

import yaml

LISTS = ("clusters", "contexts", "users")


def files(kubeconfig: str | None) -> list[Path]:
    """Where kubectl would look: the file named, else those of KUBECONFIG, else ~/.kube/config."""
    given = kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    return [Path(one).expanduser() for one in given.split(os.pathsep) if one]


def problem(kubeconfig: str | None) -> str | None:
    """What is wrong with the first file that is not a valid kubeconfig. None if every file that exists is valid."""
    for file in files(kubeconfig):
        if file.is_file() and (wrong := _wrong(file)) is not None:
            return f"{file} is not a valid kubeconfig: {wrong}. Name another one with --kubeconfig, or set KUBECONFIG"
    return None


def _wrong(file: Path) -> str | None:
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
        if not isinstance(entries, list) or not all(isinstance(one, dict) and "name" in one for one in entries):
            return f"{name} is not a list of entries with names"
        kind = name.removesuffix("s")
        if nameless := [one["name"] for one in entries if not isinstance(one.get(kind), dict)]:
            return f"{nameless[0]!r} of {name} has no field {kind}"
    return None
