"""Runs `qwen35 status` and `qwen35 report` against a cluster. Each function takes options and returns an exit code."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live

from qwen35_operator.console.follow import ConnectionProblem, follow
from qwen35_operator.console.lookup import (
    NotShown,
    check_credentials,
    default_namespace,
    history_of,
    list_trainings,
    training,
    warnings_of,
)
from qwen35_operator.console.screen import draw
from qwen35_operator.console.status_line import line
from qwen35_operator.console.training_table import table
from qwen35_operator.console.training_view import StatusUnreadable, TrainingView
from qwen35_operator.kube.client import JsonObject, RestClient, connect
from qwen35_operator.operator_settings import SettingsRefused
from qwen35_operator.status.times import rfc3339
from qwen35_trainer.exits import FAILED, INTERRUPTED
from qwen35_trainer.formatting import counted
from qwen35_trainer.page import write_page
from qwen35_trainer.progress.html_report import render_report as page
from qwen35_trainer.progress.packed_history import HistoryUnreadable, unpack
from qwen35_trainer.progress.run_fold import RunFold
from qwen35_trainer.progress.sample_section import sample_section

__all__ = ["ClusterAccess", "NotShown", "report", "status"]

type States = AsyncIterator[JsonObject | ConnectionProblem | None]

MAX_COLUMNS: Final = 96
"""Maximum width of the screen of `qwen35 status`, in characters: longer lines are hard to read."""
PIPED_COLUMNS: Final = 200
"""Width, in characters, of the list of trainings if it goes to a file or a pipe: programs need whole names."""


@dataclass(frozen=True)
class ClusterAccess:
    """The cluster and the namespace that a command reads.

    kubeconfig: path of the file; None for the files that kubectl would read. context: None for the current context. If
    both are None, KUBECONFIG is not set, and this process runs in a pod, the command uses the pod's credentials.
    namespace: None for the namespace of the context, or of the pod.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def effective_namespace(self) -> str:
        return self.namespace or default_namespace(self.kubeconfig, self.context)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RestClient]:
        """Context manager: connect to the cluster, and disconnect at the end.

        Raises NotShown if there are no valid credentials.
        """
        check_credentials(self.kubeconfig, self.context)
        try:
            client = await connect(self.kubeconfig, lambda verb, resource, code: None, self.context)
        except (SettingsRefused, OSError) as error:
            raise NotShown(str(error)) from error
        try:
            yield client
        finally:
            await client.close()


def status(
    cluster: ClusterAccess, name: str | None, *, everywhere: bool, watch: bool, as_json: bool, console: Console
) -> int:
    """Run `qwen35 status`: show the training `name`, or, if `name` is None, one line for each training.

    everywhere: list the trainings of all namespaces. watch: follow the training until it ends. as_json: print JSON.
    Returns an exit code: 0, or INTERRUPTED after Ctrl-C. With `watch`, returns FAILED if the training failed or was
    deleted. Raises NotShown if options contradict each other, or if the training does not exist or cannot be read.
    """
    if name is None and watch:
        raise NotShown("--watch follows one training. Name it: qwen35 status NAME --watch")
    if name is not None and everywhere:
        raise NotShown(f"-A lists the trainings of all namespaces. Leave out -A, or {name}")
    if name is None:
        return _run(_list(cluster, everywhere=everywhere, as_json=as_json, console=console))
    if watch:
        return _run(_watch(cluster, name, as_json=as_json, console=console))
    return _run(_show(cluster, name, as_json=as_json, console=console))


def report(cluster: ClusterAccess, name: str, output: Path | None, console: Console) -> int:
    """Run `qwen35 report`: write the report of a training as one HTML file.

    output: path of the file; None for NAME-report.html in the current folder. Returns an exit code: 0, or INTERRUPTED
    after Ctrl-C. Raises NotShown if the cluster has no such training or no readable history of it, or if the report
    cannot be written.
    """
    return _run(_report(cluster, name, output or Path(f"{name}-report.html"), console))


def _run(command: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(command)
    except KeyboardInterrupt:
        return INTERRUPTED
    except StatusUnreadable as error:
        raise NotShown(str(error)) from error


async def _list(cluster: ClusterAccess, *, everywhere: bool, as_json: bool, console: Console) -> int:
    async with cluster.client() as client:
        trainings = await list_trainings(client, None if everywhere else cluster.effective_namespace)
        if as_json:
            _print(console, json.dumps([_document(raw) for raw in trainings], indent=2))
        elif not trainings:
            where = "the cluster" if everywhere else f"namespace {cluster.effective_namespace}"
            _print(console, f"no trainings in {where}")
        else:
            trainings.sort(key=lambda raw: (raw["metadata"]["namespace"], raw["metadata"]["name"]))
            drawn = table([TrainingView.of(raw) for raw in trainings], client.now(), namespaces=everywhere)
            console.print(drawn, width=console.width if console.is_terminal else PIPED_COLUMNS, crop=False)
    return 0


async def _show(cluster: ClusterAccess, name: str, *, as_json: bool, console: Console) -> int:
    async with cluster.client() as client:
        raw, _ = await training(client, cluster.effective_namespace, name)
        view = TrainingView.of(raw, await warnings_of(client, raw))
        if as_json:
            _print(console, json.dumps(_document(raw, view), indent=2))
        else:
            console.print(_screen(view, client))
    return 0


async def _watch(cluster: ClusterAccess, name: str, *, as_json: bool, console: Console) -> int:
    """Show the training at each change until it has ended or was deleted. Returns 0 if it succeeded, otherwise FAILED.

    In a terminal the output is a screen that is redrawn. With `as_json`, or without a terminal, it is a line for each
    change.
    """
    async with cluster.client() as client, aclosing(follow(client, cluster.effective_namespace, name)) as states:
        if console.is_terminal and not as_json:
            view = await _redraw(client, states, console)
        else:
            view = await _log(client, states, console, as_json=as_json)
    if view is None:
        _print(console, f"training {name} was deleted")
    return 0 if view is not None and view.state == "Succeeded" else FAILED


async def _redraw(client: RestClient, states: States, console: Console) -> TrainingView | None:
    """Draw the screen at each change of the training, and each second, so that the ages on the screen stay correct.

    states: the items that `follow` yields. Returns the training when it has ended, or None if it was deleted.
    """
    view: TrainingView | None = None
    trouble = ""

    def drawn() -> RenderableType:
        return "" if view is None else _screen(view, client, trouble)

    with Live(console=console, get_renderable=drawn, refresh_per_second=1) as live:
        async for state in states:
            if state is None:
                return None
            if isinstance(state, ConnectionProblem):
                trouble = state.text
            else:
                view, trouble = await _with_warnings(client, state, view)
            live.refresh()
            if view is not None and view.ended:
                return view
    raise AssertionError("follow ends only after the training")


async def _log(client: RestClient, states: States, console: Console, *, as_json: bool) -> TrainingView | None:
    """Print a line of text, or with `as_json` of JSON, for each change of the training.

    Problems with the connection are written to stderr. states: the items that `follow` yields. Returns the training
    when it has ended, or None if it was deleted.
    """
    printed = ""
    async for state in states:
        if state is None:
            return None
        if isinstance(state, ConnectionProblem):
            sys.stderr.write(f"{state.text}\n")
            continue
        view = TrainingView.of(state)
        text = line(view, client.now())
        if as_json:
            _print(console, json.dumps(_document(state)))
        elif text.partition(" ")[2] != printed:  # more than the time has changed
            _print(console, text)
        printed = text.partition(" ")[2]
        if view.ended:
            return view
    raise AssertionError("follow ends only after the training")


async def _with_warnings(client: RestClient, raw: JsonObject, before: TrainingView | None) -> tuple[TrainingView, str]:
    """Return the view of a training with its latest warnings, and an empty string.

    If the warnings cannot be read, return the view with the warnings of `before` instead, and the reason as a string.
    before: the previous view of the training; None if this is the first.
    """
    try:
        return TrainingView.of(raw, await warnings_of(client, raw)), ""
    except NotShown as problem:
        return TrainingView.of(raw, () if before is None else before.warnings), str(problem)


async def _report(cluster: ClusterAccess, name: str, output: Path, console: Console) -> int:
    async with cluster.client() as client:
        packed = await history_of(client, cluster.effective_namespace, name)
    try:
        history = unpack(packed)
    except HistoryUnreadable as error:
        raise NotShown(
            f"the history of training {name} cannot be read: {error}. Use the qwen35 of the trainer's version"
        ) from error
    try:
        responses = sample_section(history.samples, history.summary["maxVersionLag"])
        text = page(name, RunFold.of(history.records), history.manifest, history.summary, responses)
    except ImportError as error:
        raise NotShown(f"a report needs {error.name}. Install it: pip install 'qwen35[trainer]'") from error
    try:
        write_page(output, text)
    except OSError as error:
        raise NotShown(f"--output {output} was not written: {error.strerror}. Name another file") from error
    updates = history.summary["updates"]
    thin = f"; its charts show {updates - history.left_out:,} of them" if history.left_out else ""
    _print(console, f"Report: {output} ({history.summary['outcome'] or 'so far'}, {counted(updates, 'update')}{thin})")
    return 0


def _document(raw: JsonObject, view: TrainingView | None = None) -> JsonObject:
    """Return the document that --json prints: the training's metadata and status, with the API's field names.

    view: the view whose warnings are added as the field `warnings`; None for a document without this field.
    """
    metadata = {
        key: raw["metadata"].get(key) for key in ("name", "namespace", "uid", "generation", "creationTimestamp")
    }
    document: JsonObject = {"metadata": metadata, "status": raw.get("status") or {}}
    if view is not None:
        document["warnings"] = (
            None
            if view.warnings is None
            else [
                {"time": rfc3339(event.time), "reason": event.reason, "message": event.message}
                for event in view.warnings
            ]
        )
    return document


def _screen(view: TrainingView, client: RestClient, trouble: str = "") -> RenderableType:
    return Constrain(draw(view, client.now(), trouble), MAX_COLUMNS)


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
