"""Reads trainings from the cluster, and explains refusals to the user of the command."""

import base64
import binascii
import difflib
from pathlib import Path
from typing import Any, Final

from kubernetes.aio import config as kube_config

from qwen35_operator.api.v1alpha1 import KIND
from qwen35_operator.console.training_view import WarningEvent, latest_warnings
from qwen35_operator.kube.api_errors import ApiError, Forbidden, NotFound, Unauthorized
from qwen35_operator.kube.client import JsonObject, RestClient
from qwen35_operator.kube.kinds import CONFIG_MAP, EVENT, TRAINING, ObjectKind
from qwen35_operator.kube.kubeconfig import files, problem, uses_pod
from qwen35_trainer.contract.shared_names import HISTORY_KEY, history_name

SHOWN_WARNINGS: Final = 3
SHOWN_NAMES: Final = 3
POD_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NotShown(Exception):
    """A command cannot show what the user requested. The message is one line with the reason and the fix."""


def check_credentials(kubeconfig: str | None, context: str | None) -> None:
    """Check that there are credentials for a cluster, without contacting it. Raises NotShown otherwise.

    kubeconfig: path of the file; None for the files that kubectl would read. context: None for the current context. If
    both are None and KUBECONFIG is not set, a process that runs in a pod has the pod's credentials and needs no kubeconfig.
    """
    if uses_pod(kubeconfig, context):
        return
    paths = files(kubeconfig)
    if not any(path.is_file() for path in paths):
        shown = ", ".join(map(str, paths)) or "KUBECONFIG"
        raise NotShown(f"no kubeconfig: the file {shown} does not exist. Name one with --kubeconfig, or set KUBECONFIG")
    if (fault := problem(kubeconfig)) is not None:
        raise NotShown(fault)


def default_namespace(kubeconfig: str | None, context: str | None) -> str:
    """Return the namespace of the kubeconfig's context, or of the pod in which this process runs; otherwise "default".

    kubeconfig: path of the file; None for the files that kubectl would read. context: None for the current context. If
    both are None, KUBECONFIG is not set, and this process runs in a pod, returns the pod's namespace without reading a
    kubeconfig. Otherwise raises NotShown if the kubeconfig is missing, is invalid, or has no current context.
    """
    if uses_pod(kubeconfig, context):
        return POD_NAMESPACE_FILE.read_text().strip() if POD_NAMESPACE_FILE.is_file() else "default"
    check_credentials(kubeconfig, context)
    try:
        contexts, active = kube_config.list_kube_config_contexts(kubeconfig)
    except kube_config.ConfigException as error:  # it has no current context
        raise NotShown(f"the kubeconfig does not name a namespace: {error}. Name one with -n") from error
    chosen: dict[str, Any] = next((entry for entry in contexts if entry["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


async def list_trainings(client: RestClient, namespace: str | None) -> list[JsonObject]:
    """Return the trainings of a namespace; None for all namespaces. Raises NotShown if the request fails."""
    try:
        page = await client.get(TRAINING.path(namespace))
    except ApiError as error:
        raise refused(error, "list", TRAINING, namespace) from error
    return list(page["items"] or ())


async def find(client: RestClient, namespace: str, name: str) -> tuple[JsonObject | None, str]:
    """Return the training, or None if it does not exist, and the resourceVersion from which to watch it.

    Raises ApiError if the request fails.
    """
    page = await client.get(TRAINING.path(namespace), {"fieldSelector": f"metadata.name={name}"})
    return next(iter(page["items"] or ()), None), str(page["metadata"]["resourceVersion"])


async def training(client: RestClient, namespace: str, name: str) -> tuple[JsonObject, str]:
    """Return the training, and the resourceVersion from which to watch it.

    Raises NotShown if the request fails, or if the training does not exist; the message then names other trainings.
    """
    try:
        raw, version = await find(client, namespace, name)
    except ApiError as error:
        raise refused(error, "list", TRAINING, namespace) from error
    if raw is None:
        others = [other["metadata"]["name"] for other in await list_trainings(client, namespace)]
        raise NotShown(not_found(namespace, name, others))
    return raw, version


async def warnings_of(client: RestClient, raw: JsonObject) -> tuple[WarningEvent, ...] | None:
    """Return the latest Warning events of a training, newest first; None without the permission to list events.

    raw: the training's object. Raises NotShown if the request fails for another reason.
    """
    metadata = raw["metadata"]
    selector = f"involvedObject.kind={KIND},involvedObject.name={metadata['name']},type=Warning"
    try:
        page = await client.get(EVENT.path(metadata["namespace"]), {"fieldSelector": selector})
    except Forbidden:
        return None
    except ApiError as error:
        raise refused(error, "list", EVENT, metadata["namespace"]) from error
    return latest_warnings(page["items"] or (), metadata["uid"], SHOWN_WARNINGS)


async def history_of(client: RestClient, namespace: str, name: str) -> bytes:
    """Return the packed history of a training, which its trainer wrote for reports.

    Raises NotShown if the training or its history does not exist, or if the request fails.
    """
    config_map = history_name(name)
    try:
        raw = await client.get(CONFIG_MAP.path(namespace, config_map))
    except NotFound:
        await training(client, namespace, name)
        raise NotShown(
            f"training {name} has no ConfigMap {config_map}: no attempt has started yet, or its children were deleted "
            "cleanupSecondsAfterFinished after its end"
        ) from None
    except ApiError as error:
        raise refused(error, "get", CONFIG_MAP, namespace) from error
    text = (raw.get("binaryData") or {}).get(HISTORY_KEY)
    if text is None:
        raise NotShown(
            f"training {name} has no history yet: the trainer writes it with the first evaluation or checkpoint"
        )
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise NotShown(f"ConfigMap {config_map}, {HISTORY_KEY}: {error}") from error


def not_found(namespace: str, name: str, others: list[str]) -> str:
    """Return the error message for a training that does not exist.

    others: the names of the trainings in the namespace. The message lists similar names, or some of `others` if no name
    is similar.
    """
    similar = difflib.get_close_matches(name, others, SHOWN_NAMES)
    if similar:
        fix = f"Did you mean {' or '.join(similar)}?"
    elif others:
        shown = ", ".join(sorted(others)[:SHOWN_NAMES])
        more = ", …" if len(others) > SHOWN_NAMES else ""
        fix = f"There are {len(others)}: {shown}{more}. Name another namespace with -n"
    else:
        fix = "The namespace has no trainings; name another with -n, or list all with: qwen35 status -A"
    return f"no training {name} in namespace {namespace}. {fix}"


def refused(error: ApiError, verb: str, kind: ObjectKind, namespace: str | None) -> NotShown:
    """Return an exception that explains to the user why a request failed, and what to do.

    error: the API server's error. verb: what was requested, such as "list". namespace: None for all namespaces.
    """
    where = "all namespaces" if namespace is None else f"namespace {namespace}"
    if isinstance(error, NotFound) and kind is TRAINING:
        return NotShown(
            f"the cluster has no kind {TRAINING.resource}. Install the operator's chart, or apply what `qwen35 crd` prints"
        )
    if isinstance(error, Unauthorized):
        return NotShown(
            f"the API server does not accept your credentials: {error.message}. Log in again, or name a --context"
        )
    if isinstance(error, Forbidden):
        return NotShown(
            f"no permission to {verb} {kind.resource} in {where}: {error.message}. Ask for a role that has it"
        )
    return NotShown(f"cannot {verb} {kind.resource} in {where}: {error.message or error}. Is the cluster up?")
