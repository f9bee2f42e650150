"""A link to the operator through ConfigMaps of a cluster, with the few Kubernetes API calls that it needs.

    report   PATCH -progress (merge)
    history  PATCH -history (merge)
    orders   LIST -control by name ─► WATCH from there ─┐
               ▲                                        │ ended, cut, 410 Gone, silent
               └── after PAUSE_SECONDS, or a backoff ◄──┘

waits on         unblocked by                         deadline
a patch: answer  the API server                       CALL_SECONDS
watch: events    a change, or a bookmark each minute  MAX_SILENCE_SECONDS without any; WATCH_SECONDS in all
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from qwen35_trainer.contract import ContractError, Control, ProgressReport, parse_control
from qwen35_trainer.contract.retry import backoff_seconds
from qwen35_trainer.contract.shared_names import (
    CONTROL_KEY,
    HISTORY_KEY,
    PROGRESS_KEY,
    control_name,
    history_name,
    progress_name,
)
from qwen35_trainer.runtime.link.operator_link import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    LinkDown,
    ServiceAccount,
)

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
WATCH_SECONDS = 300
"""Time, in seconds, after which the API server ends a watch. The link then lists the ConfigMap again, so it
misses no change."""
MAX_SILENCE_SECONDS = 90.0
"""Time, in seconds, without a received byte after which a watch counts as broken. The API server sends a bookmark
about every minute."""
READ_BUFFER_BYTES = 1 << 20
"""Size of aiohttp's read buffer. aiohttp accepts lines of twice this size, and an object in etcd has at most 1.5 MiB."""

PAUSE_SECONDS = 1.0
"""Pause between two watches, in seconds, so that a server that ends each watch immediately does not get
too many requests."""
FAILURES_BEFORE_WARNING = 3
"""Number of consecutive failures after which a warning is logged.

A single failure is usual, and the next watch works.
"""
MIN_STEADY_SECONDS = 30.0
"""Time, in seconds, after which a watch counts as having worked.

A later failure of the watch begins a new count of consecutive failures.
"""

_CALL_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError)
"""Exceptions of a failed call: no answer, an error status, or an answer with unexpected content."""


class ConfigMapLink:
    """A link to the operator through the ConfigMaps of a training. training: the training's name."""

    def __init__(self, account: ServiceAccount, *, namespace: str, training: str) -> None:
        self._account = account
        self._collection = f"{account.server}/api/v1/namespaces/{namespace}/configmaps"
        self._progress, self._control = progress_name(training), control_name(training)
        self._history = history_name(training)
        self._opened: aiohttp.ClientSession | None = None

    async def report(self, progress: ProgressReport) -> None:
        await self._patch(self._progress, {"data": {PROGRESS_KEY: progress.text()}})

    async def history(self, packed: bytes) -> None:
        await self._patch(self._history, {"binaryData": {HISTORY_KEY: base64.b64encode(packed).decode()}})

    async def _patch(self, name: str, change: dict[str, Any]) -> None:
        try:
            async with self._session().patch(
                f"{self._collection}/{name}",
                data=json.dumps(change),
                headers={**self._authorization(), "Content-Type": "application/merge-patch+json"},
                params={"fieldManager": "qwen35-trainer"},
                timeout=aiohttp.ClientTimeout(total=CALL_SECONDS),
            ) as answer:
                await _checked(answer)
        except _CALL_ERRORS as error:
            raise LinkDown(f"ConfigMap {name} was not written: {_message(error)}") from error

    async def orders(self) -> AsyncIterator[Control]:
        latest_text: str | None = None
        failures = 0
        clock = asyncio.get_running_loop().time
        while True:
            started = clock()
            try:
                async for text in self._texts():
                    if text == latest_text:
                        continue
                    latest_text = text
                    if (control := self._parse(text)) is not None:
                        yield control
                failures = 0
                await asyncio.sleep(PAUSE_SECONDS)
            except _CALL_ERRORS as error:
                failures = 1 if clock() - started > MIN_STEADY_SECONDS else failures + 1
                if failures == FAILURES_BEFORE_WARNING:
                    logger.warning("ConfigMap %s cannot be watched: %s; still trying", self._control, _message(error))
                wait = backoff_seconds(failures, first=FIRST_BACKOFF_SECONDS, maximum=MAX_BACKOFF_SECONDS)
                await asyncio.sleep(wait)

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _texts(self) -> AsyncIterator[str]:
        """Yield the text of the orders in the ConfigMap, and the new text after each change, until the watch ends.

        Raises one of _CALL_ERRORS if the list or the watch fails.
        """
        selector = {"fieldSelector": f"metadata.name={self._control}"}
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        # A list, because it returns a version from which to watch; the version of the object itself may be too old.
        async with self._session().get(
            self._collection, params=selector, headers=self._authorization(), timeout=timeout
        ) as answer:
            listed = await (await _checked(answer)).json()
        for item in listed["items"]:
            yield _control_text(item)
        watch = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        async with self._session().get(
            self._collection,
            params={**selector, **watch, "resourceVersion": listed["metadata"]["resourceVersion"]},
            headers=self._authorization(),
            timeout=aiohttp.ClientTimeout(
                total=WATCH_SECONDS + 30, connect=CALL_SECONDS, sock_read=MAX_SILENCE_SECONDS
            ),
        ) as answer:
            async for line in (await _checked(answer)).content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:  # this version is too old to watch from; list again
                        return
                    raise ValueError(f"the watch ended: {event['object'].get('message', event['object'])}")
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield _control_text(event["object"])

    def _parse(self, text: str) -> Control | None:
        """Return the orders in `text`; None if `text` is empty, or, with a warning in the log, if it cannot be parsed."""
        try:
            return parse_control(text) if text else None
        except ContractError as error:
            logger.warning("ConfigMap %s: %s; the previous orders stay in force", self._control, error)
            return None

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(ssl=self._account.context())
            self._opened = aiohttp.ClientSession(connector=connector, read_bufsize=READ_BUFFER_BYTES)
        return self._opened

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._account.token}"}


async def _checked(answer: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """Return `answer` if its status is below 400. Raises ValueError with the API server's message otherwise."""
    if answer.status < 400:
        return answer
    raise ValueError(f"{answer.status}: {_status_message(await answer.text())}")


def _status_message(body: str) -> str:
    """Return the message in `body`, the JSON of a Status object of Kubernetes, or the beginning of any other `body`."""
    try:
        status: Any = json.loads(body)
        return str(status["message"])
    except (ValueError, TypeError, KeyError):
        return body[:200]


def _control_text(config_map: Any) -> str:  # noqa: ANN401  # JSON from the API server
    """Return the text of the orders in a ConfigMap, or "" if the ConfigMap has none.

    Raises ValueError for any other object.
    """
    try:
        return str((config_map.get("data") or {}).get(CONTROL_KEY, ""))
    except AttributeError:
        raise ValueError(f"not a ConfigMap: {str(config_map)[:200]}") from None


def _message(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
