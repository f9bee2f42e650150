"""Uses the trainer's link to the operator in every way, in a process that has what a head pod has: variables, token, authority.

    python account_link.py FOLDER        FOLDER: where the token and the authority are mounted

Parent and child take turns: the child writes a report and a history, reads the orders, and prints the file of its link; the parent
changes the orders; the child prints, as JSON, the requests that the API server permitted and refused, and ends. The packages in PYTHONPATH are
those of any release, so this file imports nothing of the tests.
"""

import asyncio
import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from qwen35_trainer.contract import ProgressReport
from qwen35_trainer.runtime.link import operator_link

VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}


def right(method: str, path: str, query: Mapping[str, str]) -> tuple[str, str]:
    """The verb and the name that a request for ConfigMaps needs in a Role; the name is empty if it names none."""
    *_, last = path.split("/")
    if last != "configmaps":
        return VERBS[method], last
    verb = ("watch" if "watch" in query else "list") if method == "GET" else VERBS[method]
    return verb, query.get("fieldSelector", "").removeprefix("metadata.name=")


async def used(folder: Path) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Use the link. Returns what the API server permitted, and what it refused. Raises LinkDown if it refuses a write."""
    permitted, refused = set(), set()

    async def note(_: Any, __: Any, ended: aiohttp.TraceRequestEndParams) -> None:
        answers = refused if ended.response.status in (401, 403) else permitted
        answers.add(right(ended.method, ended.url.path, ended.url.query))

    traces = aiohttp.TraceConfig()
    traces.on_request_end.append(note)
    aiohttp.ClientSession = functools.partial(aiohttp.ClientSession, trace_configs=[traces])  # type: ignore[assignment, misc]
    link, attempt = operator_link.open_link("cluster", account=folder)
    await link.report(ProgressReport(attempt=attempt, state="Running", time=time.time()))
    await link.history(b"packed")
    orders = link.orders()
    await anext(orders)
    print(operator_link.__file__, flush=True)
    await anext(orders)
    await link.close()
    return permitted, refused


if __name__ == "__main__":
    print(json.dumps([sorted(rights) for rights in asyncio.run(used(Path(sys.argv[1])))]))
