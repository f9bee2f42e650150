"""A link through ConfigMaps of a cluster, by the few calls of the Kubernetes API that it needs.

    report   PATCH -progress (merge)
    history  PATCH -history (merge)
    orders   LIST -control by name ─► WATCH from there ─┐
               ▲                                        │ ended, cut, 410 Gone, silent
               └──── in a second, after failures later ◄┘

waits on         unblocked by                        deadline
a patch: answer  the API server                      CALL_SECONDS
watch: events    a change, or a bookmark each minute  SILENT_SECONDS without any; WATCH_SECONDS in all
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from qwen35_trainer.contract import ContractError, Control, Progress, parse_control
from qwen35_trainer.contract.names import (
    CONTROL_KEY,
    HISTORY_KEY,
    PROGRESS_KEY,
    control_name,
    history_name,
    progress_name,
)
from qwen35_trainer.runtime.link.account import Account
from qwen35_trainer.runtime.link.backoff import backoff
from qwen35_trainer.runtime.link.base import LinkDown

logger = logging.getLogger(__name__)

CALL_SECONDS = 10.0
WATCH_SECONDS = 300
"""The API server ends a watch after so long; the list that follows makes up for anything it may have missed."""
SILENT_SECONDS = 90.0
"""A connection whose other end is gone says nothing; a living one brings a bookmark about every minute."""
LARGEST_LINE = 1 << 20
"""Half the bytes of the longest event that is read: an object in etcd has at most 1.5 MiB."""

PAUSE_SECONDS = 1.0
"""Between two watches, so that a server that ends them at once is not asked without pause."""
WORTH_A_WORD = 3
"""Failures in a row: watches are cut now and then, and the next one works."""
STEADY_SECONDS = 30.0
"""A watch that lasted so long was no failure's continuation."""

_TROUBLE = (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError)
"""No answer, a bad one, or one of another shape."""


class ConfigMapLink:
    """The ConfigMaps of `training` in `namespace`."""

    def __init__(self, account: Account, *, namespace: str, training: str) -> None:
        self._account = account
        self._collection = f"{account.server}/api/v1/namespaces/{namespace}/configmaps"
        self._progress, self._control = progress_name(training), control_name(training)
        self._history = history_name(training)
        self._opened: aiohttp.ClientSession | None = None

    async def report(self, progress: Progress) -> None:
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
        except _TROUBLE as error:
            raise LinkDown(f"ConfigMap {name} was not written: {_reason(error)}") from error

    async def orders(self) -> AsyncIterator[Control]:
        said: str | None = None
        failures = 0
        clock = asyncio.get_running_loop().time
        while True:
            started = clock()
            try:
                async for text in self._texts():
                    if text == said:
                        continue
                    said = text
                    if (control := self._read(text)) is not None:
                        yield control
                failures = 0
                await asyncio.sleep(PAUSE_SECONDS)
            except _TROUBLE as error:
                failures = 1 if clock() - started > STEADY_SECONDS else failures + 1
                if failures == WORTH_A_WORD:
                    logger.warning("ConfigMap %s cannot be watched: %s; trying on", self._control, _reason(error))
                await asyncio.sleep(backoff(failures))

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    async def _texts(self) -> AsyncIterator[str]:
        """The key as it is, then at each change, until the watch ends. Raises what is in _TROUBLE."""
        only = {"fieldSelector": f"metadata.name={self._control}"}
        listing = aiohttp.ClientTimeout(total=CALL_SECONDS)
        # A list, because it tells a version to watch from: the object's own may be too old for that.
        async with self._session().get(
            self._collection, params=only, headers=self._authorization(), timeout=listing
        ) as answer:
            listed = await (await _checked(answer)).json()
        for item in listed["items"]:
            yield _text(item)
        watch = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        async with self._session().get(
            self._collection,
            params={**only, **watch, "resourceVersion": listed["metadata"]["resourceVersion"]},
            headers=self._authorization(),
            timeout=aiohttp.ClientTimeout(total=WATCH_SECONDS + 30, connect=CALL_SECONDS, sock_read=SILENT_SECONDS),
        ) as answer:
            async for line in (await _checked(answer)).content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:  # too old to watch from: the next list is not
                        return
                    raise ValueError(f"the watch ended: {event['object'].get('message', event['object'])}")
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield _text(event["object"])

    def _read(self, text: str) -> Control | None:
        try:
            return parse_control(text) if text else None
        except ContractError as error:
            logger.warning("ConfigMap %s: %s; what was asked before stays", self._control, error)
            return None

    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            connector = aiohttp.TCPConnector(ssl=self._account.context())
            self._opened = aiohttp.ClientSession(connector=connector, read_bufsize=LARGEST_LINE)
        return self._opened

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._account.token}"}


async def _checked(answer: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    """The answer, if it is a good one. Raises ValueError with the API server's own words otherwise."""
    if answer.status < 400:
        return answer
    raise ValueError(f"{answer.status}: {_words(await answer.text())}")


def _words(body: str) -> str:
    """The message of a Status object, or the body as it came."""
    try:
        status: Any = json.loads(body)
        return str(status["message"])
    except (ValueError, TypeError, KeyError):
        return body[:200]


def _text(config_map: Any) -> str:  # noqa: ANN401  # JSON as it came
    """The key's value; empty where there is none. Raises ValueError for what is no ConfigMap."""
    try:
        return str((config_map.get("data") or {}).get(CONTROL_KEY, ""))
    except AttributeError:
        raise ValueError(f"no ConfigMap: {str(config_map)[:200]}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__
