"""What is read from the cluster, and what a refusal means to who asked."""

import base64
import binascii
import difflib
import os
from pathlib import Path
from typing import Any, Final

from kubernetes.aio import config as settings

from qwen35_operator.api.v1alpha1 import KIND
from qwen35_operator.console.seen import Warned, warned
from qwen35_operator.kube.client import IN_POD, Json, RestClient
from qwen35_operator.kube.errors import ApiError, Forbidden, NotFound
from qwen35_operator.kube.kinds import CONFIG_MAP, EVENT, TRAINING, Kind
from qwen35_operator.kube.kubeconfig import files, problem
from qwen35_trainer.contract.names import HISTORY_KEY, history_name

WARNINGS: Final = 3
NEAR: Final = 3
POD_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class NotShown(Exception):
    """What was asked for cannot be shown; one line that says why and what to do."""


def configured(kubeconfig: str | None, context: str | None) -> None:
    """Whether there is anything to read credentials from. Raises NotShown."""
    if kubeconfig is None and context is None and IN_POD in os.environ:
        return
    found = files(kubeconfig)
    if not any(file.is_file() for file in found):
        shown = ", ".join(map(str, found)) or "KUBECONFIG"
        raise NotShown(f"no kubeconfig: the file {shown} does not exist. Name one with --kubeconfig, or set KUBECONFIG")
    if (wrong := problem(kubeconfig)) is not None:
        raise NotShown(wrong)


def home(kubeconfig: str | None, context: str | None) -> str:
    """The namespace that is meant when none is named: the context's, or the pod's own. Raises NotShown."""
    if kubeconfig is None and context is None and IN_POD in os.environ:
        return POD_NAMESPACE.read_text().strip() if POD_NAMESPACE.is_file() else "default"
    configured(kubeconfig, context)
    try:
        contexts, active = settings.list_kube_config_contexts(kubeconfig)
    except settings.ConfigException as error:  # it has no current context
        raise NotShown(f"the kubeconfig does not say which namespace is meant: {error}. Name it by -n") from error
    chosen: dict[str, Any] = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


async def listed(client: RestClient, namespace: str | None) -> list[Json]:
    """The trainings of a namespace, or of all. Raises NotShown."""
    try:
        page = await client.get(TRAINING.path(namespace))
    except ApiError as error:
        raise refused(error, "list", TRAINING, namespace) from error
    return list(page["items"] or ())


async def named(client: RestClient, namespace: str, name: str) -> tuple[Json | None, str]:
    """The training of that name, if there is one, and a version to watch from. Raises ApiError."""
    page = await client.get(TRAINING.path(namespace), {"fieldSelector": f"metadata.name={name}"})
    return next(iter(page["items"] or ()), None), str(page["metadata"]["resourceVersion"])


async def training(client: RestClient, namespace: str, name: str) -> tuple[Json, str]:
    """The training, and a version to watch from. Raises NotShown, naming those of a similar name."""
    try:
        found, version = await named(client, namespace, name)
    except ApiError as error:
        raise refused(error, "list", TRAINING, namespace) from error
    if found is None:
        others = [one["metadata"]["name"] for one in await listed(client, namespace)]
        raise NotShown(missing(namespace, name, others))
    return found, version


async def warnings_of(client: RestClient, raw: Json) -> tuple[Warned, ...] | None:
    """The latest Warning events of a training, newest first; None when they may not be read. Raises NotShown."""
    about = raw["metadata"]
    selector = f"involvedObject.kind={KIND},involvedObject.name={about['name']},type=Warning"
    try:
        page = await client.get(EVENT.path(about["namespace"]), {"fieldSelector": selector})
    except Forbidden:
        return None
    except ApiError as error:
        raise refused(error, "list", EVENT, about["namespace"]) from error
    return warned(page["items"] or (), about["uid"], WARNINGS)


async def history_of(client: RestClient, namespace: str, name: str) -> bytes:
    """What the trainer has left for a report. Raises NotShown."""
    held = history_name(name)
    try:
        found = await client.get(CONFIG_MAP.path(namespace, held))
    except NotFound:
        await training(client, namespace, name)
        raise NotShown(
            f"training {name} has no ConfigMap {held}: no attempt has started yet, or what the training left was cleaned "
            "up, ttlSecondsAfterFinished after its end"
        ) from None
    except ApiError as error:
        raise refused(error, "get", CONFIG_MAP, namespace) from error
    text = (found.get("binaryData") or {}).get(HISTORY_KEY)
    if text is None:
        raise NotShown(f"training {name} has left no history yet: that comes with its first evaluation or checkpoint")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise NotShown(f"ConfigMap {held}, {HISTORY_KEY}: {error}") from error


def missing(namespace: str, name: str, others: list[str]) -> str:
    """That there is no such training, and which one may be meant."""
    near = difflib.get_close_matches(name, others, NEAR)
    if near:
        fix = f"Did you mean {' or '.join(near)}?"
    elif others:
        shown = ", ".join(sorted(others)[:NEAR])
        fix = f"There are {len(others)}: {shown}{', …' if len(others) > NEAR else ''}. Name another namespace by -n"
    else:
        fix = "There are none in it; name another by -n, or list all by: qwen35 status -A"
    return f"no training {name} in namespace {namespace}. {fix}"


def refused(error: ApiError, verb: str, kind: Kind, namespace: str | None) -> NotShown:
    """What the API server's answer means, and the fix."""
    where = "all namespaces" if namespace is None else f"namespace {namespace}"
    if isinstance(error, NotFound) and kind is TRAINING:
        return NotShown(
            f"the cluster has no kind {TRAINING.resource}. Install the operator's chart, or apply what `qwen35 crd` prints"
        )
    if isinstance(error, Forbidden) and error.status == 401:
        return NotShown(f"the API server does not know who asks: {error.message}. Log in again, or name a --context")
    if isinstance(error, Forbidden):
        return NotShown(
            f"no permission to {verb} {kind.resource} in {where}: {error.message}. Ask for a role that has it"
        )
    return NotShown(f"cannot {verb} {kind.resource} in {where}: {error.message or error}. Is the cluster up?")
