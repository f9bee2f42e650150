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
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from qwen35_operator.kube.store import TrainingKey
from qwen35_operator.status.printable import printable

REPEAT_SECONDS = 600.0
"""Time in which the same warning of kopf is logged once."""
MAX_WARNINGS = 50
"""Number of different warnings of kopf that are logged in REPEAT_SECONDS."""
_VARYING = re.compile(r"#\d+/\d+|\?\S*")

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


class KopfRepeats(logging.Filter):
    """Lets each warning of kopf pass once in REPEAT_SECONDS, and at most MAX_WARNINGS different ones in that time.

    kopf logs each failed request, and each namespace has a kopf of its own. While the API server is unavailable, these would
    be hundreds of lines a minute. Two warnings count as the same if they differ only in the number of the attempt and in the
    query of the URL, which contains a resourceVersion.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. Records of other libraries always are."""
        if record.name.partition(".")[0] != "kopf" or record.levelno < logging.WARNING:
            return True
        message = _VARYING.sub("", f"{record.name} {record.getMessage()}")
        with self._lock:  # called by several threads
            recent = {each: at for each, at in self._logged_at.items() if record.created - at < REPEAT_SECONDS}
            new = message not in recent and len(recent) < MAX_WARNINGS
            self._logged_at = recent | ({message: record.created} if new else {})
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
