"""`qwen35 status` and `qwen35 report`, from their options to an exit code."""

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

from qwen35_operator.console.follow import Trouble, follow
from qwen35_operator.console.line import line
from qwen35_operator.console.lookup import NotShown, configured, history_of, home, listed, training, warnings_of
from qwen35_operator.console.screen import view
from qwen35_operator.console.seen import Seen, StatusUnreadable
from qwen35_operator.console.table import table
from qwen35_operator.kube.client import Json, RestClient, connect
from qwen35_operator.settings import SettingsRefused
from qwen35_operator.status.times import rfc3339
from qwen35_trainer.exits import FAILED, INTERRUPTED
from qwen35_trainer.page import write
from qwen35_trainer.progress.formatting import counted
from qwen35_trainer.progress.history import HistoryUnreadable, unpack
from qwen35_trainer.progress.report import report as page
from qwen35_trainer.progress.sample_section import section

__all__ = ["Cluster", "NotShown", "report", "status"]

type States = AsyncIterator[Json | Trouble | None]

WIDEST: Final = 96
"""Columns: longer lines are hard to read."""
PIPED: Final = 200
"""Columns where no person looks: what reads a list needs whole names."""


@dataclass(frozen=True)
class Cluster:
    """Which one is asked, and about which namespace; None stands for what the kubeconfig says."""

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None

    @property
    def home(self) -> str:
        return self.namespace or home(self.kubeconfig, self.context)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RestClient]:
        """Raises NotShown without credentials."""
        configured(self.kubeconfig, self.context)
        try:
            client = await connect(self.kubeconfig, lambda verb, resource, code: None, self.context)
        except (SettingsRefused, OSError) as error:
            raise NotShown(str(error)) from error
        try:
            yield client
        finally:
            await client.close()


def status(
    cluster: Cluster, name: str | None, *, everywhere: bool, watch: bool, as_json: bool, console: Console
) -> int:
    """Show one training, or a line for each. Returns an exit code; with `watch`, how the training ended. Raises NotShown."""
    if name is None and watch:
        raise NotShown("--watch follows one training. Name it: qwen35 status NAME --watch")
    if name is not None and everywhere:
        raise NotShown(f"-A lists the trainings of all namespaces. Leave out -A, or {name}")
    if name is None:
        return _run(_list(cluster, everywhere=everywhere, as_json=as_json, console=console))
    if watch:
        return _run(_watch(cluster, name, as_json=as_json, console=console))
    return _run(_once(cluster, name, as_json=as_json, console=console))


def report(cluster: Cluster, name: str, output: Path | None, console: Console) -> int:
    """Write the report of a training as one HTML file. Returns an exit code. Raises NotShown."""
    return _run(_report(cluster, name, output or Path(f"{name}-report.html"), console))


def _run(command: Coroutine[Any, Any, int]) -> int:
    try:
        return asyncio.run(command)
    except KeyboardInterrupt:
        return INTERRUPTED
    except StatusUnreadable as error:
        raise NotShown(str(error)) from error


async def _list(cluster: Cluster, *, everywhere: bool, as_json: bool, console: Console) -> int:
    async with cluster.client() as client:
        found = await listed(client, None if everywhere else cluster.home)
        if as_json:
            _print(console, json.dumps([_document(raw) for raw in found], indent=2))
        elif not found:
            where = "the cluster" if everywhere else f"namespace {cluster.home}"
            _print(console, f"no trainings in {where}")
        else:
            found.sort(key=lambda raw: (raw["metadata"]["namespace"], raw["metadata"]["name"]))
            drawn = table([Seen.of(raw) for raw in found], client.now(), namespaces=everywhere)
            console.print(drawn, width=console.width if console.is_terminal else PIPED, crop=False)
    return 0


async def _once(cluster: Cluster, name: str, *, as_json: bool, console: Console) -> int:
    async with cluster.client() as client:
        raw, _ = await training(client, cluster.home, name)
        seen = Seen.of(raw, await warnings_of(client, raw))
        if as_json:
            _print(console, json.dumps(_document(raw, seen), indent=2))
        else:
            console.print(_screen(seen, client))
    return 0


async def _watch(cluster: Cluster, name: str, *, as_json: bool, console: Console) -> int:
    """Until the training is over: 0 for a success, FAILED for all else."""
    async with cluster.client() as client, aclosing(follow(client, cluster.home, name)) as states:
        if console.is_terminal and not as_json:
            seen = await _redrawn(client, states, console)
        else:
            seen = await _logged(client, states, console, as_json=as_json)
    if seen is None:
        _print(console, f"training {name} was deleted")
    return 0 if seen is not None and seen.state == "Succeeded" else FAILED


async def _redrawn(client: RestClient, states: States, console: Console) -> Seen | None:
    """A screen that is drawn again at each change, and each second since ages grow. The last state; None if deleted."""
    seen: Seen | None = None
    trouble = ""

    def drawn() -> RenderableType:
        return "" if seen is None else _screen(seen, client, trouble)

    with Live(console=console, get_renderable=drawn, refresh_per_second=1) as live:
        async for one in states:
            if one is None:
                return None
            if isinstance(one, Trouble):
                trouble = one.text
            else:
                seen, trouble = await _with_warnings(client, one, seen)
            live.refresh()
            if seen is not None and seen.over:
                return seen
    raise AssertionError("a training is followed to its end")


async def _logged(client: RestClient, states: States, console: Console, *, as_json: bool) -> Seen | None:
    """A line for each change. The last state; None if deleted."""
    said = ""
    async for one in states:
        if one is None:
            return None
        if isinstance(one, Trouble):
            sys.stderr.write(f"{one.text}\n")
            continue
        seen = Seen.of(one)
        text = line(seen, client.now())
        if as_json:
            _print(console, json.dumps(_document(one)))
        elif text.partition(" ")[2] != said:  # the same at another time is no news
            _print(console, text)
        said = text.partition(" ")[2]
        if seen.over:
            return seen
    raise AssertionError("a training is followed to its end")


async def _with_warnings(client: RestClient, raw: Json, before: Seen | None) -> tuple[Seen, str]:
    """The training with its latest warnings; with those from before, and what is in the way, where they cannot be had."""
    try:
        return Seen.of(raw, await warnings_of(client, raw)), ""
    except NotShown as problem:
        return Seen.of(raw, () if before is None else before.warnings), str(problem)


async def _report(cluster: Cluster, name: str, output: Path, console: Console) -> int:
    async with cluster.client() as client:
        packed = await history_of(client, cluster.home, name)
    try:
        history = unpack(packed)
    except HistoryUnreadable as error:
        raise NotShown(
            f"what training {name} has left for a report cannot be read: {error}. Use the qwen35 of the trainer's version"
        ) from error
    try:
        responses = section(history.samples, history.summary["maxVersionLag"])
        text = page(name, history.records, history.manifest, history.summary, responses)
    except ImportError as error:
        raise NotShown(f"a report needs {error.name}. Install it: pip install 'qwen35[trainer]'") from error
    try:
        write(output, text)
    except OSError as error:
        raise NotShown(f"--output {output} was not written: {error.strerror}. Name another file") from error
    updates = history.summary["updates"]
    thin = f"; its charts show {updates - history.left_out:,} of them" if history.left_out else ""
    _print(console, f"Report: {output} ({history.summary['outcome'] or 'so far'}, {counted(updates, 'update')}{thin})")
    return 0


def _document(raw: Json, seen: Seen | None = None) -> Json:
    """What --json prints of a training: its own status, under its own names."""
    about = {key: raw["metadata"].get(key) for key in ("name", "namespace", "uid", "generation", "creationTimestamp")}
    document: Json = {"metadata": about, "status": raw.get("status") or {}}
    if seen is not None:
        document["warnings"] = (
            None
            if seen.warnings is None
            else [{"time": rfc3339(one.time), "reason": one.reason, "message": one.message} for one in seen.warnings]
        )
    return document


def _screen(seen: Seen, client: RestClient, trouble: str = "") -> RenderableType:
    return Constrain(view(seen, client.now(), trouble), WIDEST)


def _print(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
