"""The operator's log: lines for people, or one JSON object per line for log collectors.

    {"time": "2026-01-31T10:00:00.000Z", "level": "WARNING", "logger": "qwen35_operator.reconcile_workers",
     "message": "…", "namespace": "team", "training": "demo"}

`namespace` and `training` are present while a training is reconciled, and `exception` contains the traceback of an
error.
"""

import json
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.status.printable import printable

REPEAT_SECONDS = 600.0
"""Time in which the same warning of kopf is logged once."""
MAX_WARNINGS = 50
"""Number of different warnings of kopf that are logged in REPEAT_SECONDS, without those that are always logged."""
_VARYING = re.compile(r"#\d+/\d+|\?\S*|/namespaces/[^/\s]+|@[\w-]+")

type LogFormat = Literal["text", "json"]

current: ContextVar[TrainingKey | None] = ContextVar("training", default=None)
"""The training that the running asyncio task reconciles; None in other tasks.

Tasks that the running task starts inherit the value.
"""


class JsonLines(logging.Formatter):
    """Formats each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (key := current.get()) is not None:
            line["namespace"], line["training"] = key
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)  # ASCII only: readers disagree about which other characters end a line


class TextLines(logging.Formatter):
    """Formats records for people. Messages contain texts of tenants, so control characters are replaced."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Warning(NamedTuple):
    """A warning of kopf, without what varies in its text. limited: whether it counts against MAX_WARNINGS."""

    text: str
    limited: bool


class KopfRepeats(logging.Filter):
    """Lets each warning of kopf pass once in REPEAT_SECONDS, and at most MAX_WARNINGS different ones in that time.

    kopf logs each failed request, and each namespace has a kopf of its own. While the API server is unavailable, these would
    be hundreds of lines a minute. Two warnings count as the same if they differ only in the number of the attempt, in the
    namespace, and in the query of the URL, which contains a resourceVersion. Critical warnings and those with a traceback
    are always logged once, because they are rare and report bugs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a filter that has seen no warnings. clock: returns monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._logged_at: dict[_Warning, float] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. Records of other libraries always are."""
        if record.name.partition(".")[0] != "kopf" or record.levelno < logging.WARNING:
            return True
        limited = record.levelno < logging.CRITICAL and not record.exc_info
        warning = _Warning(_VARYING.sub("", f"{record.name} {record.getMessage()}"), limited)
        with self._lock:  # called by several threads
            now = self._clock()
            recent = {each: at for each, at in self._logged_at.items() if now - at < REPEAT_SECONDS}
            full = limited and sum(each.limited for each in recent) >= MAX_WARNINGS
            new = warning not in recent and not full
            self._logged_at = recent | ({warning: now} if new else {})
        return new


def begin(form: LogFormat, *, verbose: bool) -> None:
    """Start to write the log of this process to stderr.

    form: "text" for people, "json" for log collectors. verbose: whether to log debug messages too.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(KopfRepeats())
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])
    logging.getLogger("qwen35_operator").setLevel(logging.DEBUG if verbose else logging.INFO)
    # kopf warns that it handles no signals; this process handles them itself.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
