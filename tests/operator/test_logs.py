"""One JSON object per line, whatever is logged; and which training it was about."""

import asyncio
import json
import logging
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_operator import logs
from qwen35_operator.logs import JsonLines, KopfRepeats, TextLines


def record(message: str, *arguments: object, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "a.b", "levelname": "INFO", "msg": message, "args": arguments, **fields})


def test_a_line_says_when_how_bad_who_and_what() -> None:
    created = datetime(2026, 1, 31, 10, 0, 0, 250_000, UTC).timestamp()
    line = json.loads(JsonLines().format(record("%s is %d", "it", 5, created=created)))
    assert line == {"time": "2026-01-31T10:00:00.250Z", "level": "INFO", "logger": "a.b", "message": "it is 5"}


@given(message=st.text(), argument=st.text())
def test_whatever_is_logged_is_one_line_that_can_be_read(message, argument) -> None:
    line = JsonLines().format(record(message.replace("%", "") + "%s", argument))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"].endswith(argument)


def test_no_text_of_a_tenant_controls_the_terminal_that_shows_the_log() -> None:
    line = TextLines().format(record("%s", "\x1b[2J\x9b31m\x07 a\tb\nc"))
    assert line.endswith("\ufffd[2J\ufffd31m\ufffd a\tb\nc")


def test_a_traceback_is_part_of_its_line() -> None:
    try:
        int("a bug")
    except ValueError:
        line = JsonLines().format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert (
        json.loads(line)["exception"].splitlines()[-1] == "ValueError: invalid literal for int() with base 10: 'a bug'"
    )


async def test_a_line_names_the_training_that_its_task_works_on() -> None:
    async def work(name: str) -> None:
        logs.current.set(("team", name))
        await asyncio.sleep(0)
        lines.append(json.loads(JsonLines().format(record("done"))))

    lines: list[dict] = []
    await asyncio.gather(*(asyncio.create_task(work(name)) for name in ("a", "b")))
    assert [(line["namespace"], line["training"]) for line in lines] == [("team", "a"), ("team", "b")]
    assert "training" not in json.loads(JsonLines().format(record("nobody's")))


class Kopf:
    """What kopf logs, and whether it passes the filter."""

    def __init__(self) -> None:
        self.now = 0.0
        self.repeats = KopfRepeats(lambda: self.now)

    def passes(
        self, message: str, *, name: str = "kopf._cogs.clients.api", level: int = logging.ERROR, **fields: object
    ) -> bool:
        return self.repeats.filter(record(message, name=name, levelno=level, **fields))


def test_a_warning_of_kopf_is_logged_once_in_ten_minutes_whatever_the_attempt_and_the_namespace() -> None:
    kopf = Kopf()
    failed = "Request attempt #{}/6 failed: GET https://api/apis/a/v1/namespaces/{}/{}?resourceVersion={} -> refused"
    assert kopf.passes(failed.format(1, "team", "pods", 5))
    assert not kopf.passes(failed.format(2, "team", "pods", 7))
    assert not kopf.passes(failed.format(1, "other", "pods", 5))
    assert kopf.passes(failed.format(1, "team", "jobs", 5))
    assert kopf.passes("Watcher for pods.v1@team has failed: why")
    assert not kopf.passes("Watcher for pods.v1@other has failed: why")
    assert kopf.passes("Watcher for pods.v1@other has failed: another reason")
    kopf.now = logs.REPEAT_SECONDS
    assert kopf.passes(failed.format(1, "team", "pods", 5))
    for _ in range(2):
        assert kopf.passes("frequent", name="qwen35_operator.handlers")
        assert kopf.passes("frequent", level=logging.INFO)


def test_a_clock_that_is_set_back_hides_no_warning_of_kopf() -> None:
    kopf = Kopf()
    assert kopf.passes("lost", created=1e9)
    kopf.now = logs.REPEAT_SECONDS
    assert kopf.passes("lost", created=0.0)


def test_the_number_of_different_warnings_of_kopf_is_limited_except_for_bugs_and_critical_ones() -> None:
    kopf = Kopf()
    assert sum(kopf.passes(f"error {number}") for number in range(500)) == logs.MAX_WARNINGS
    for fields in ({"level": logging.CRITICAL}, {"exc_info": (KeyError, KeyError("a bug"), None)}):
        bugs = [kopf.passes(f"bug {number} {fields}", **fields) for number in range(logs.MAX_WARNINGS + 1)]
        assert all(bugs)
        assert not kopf.passes(f"bug 0 {fields}", **fields)
    assert not kopf.passes("error 1000")


@pytest.mark.processes
def test_the_operator_begins_its_log_in_either_form() -> None:
    def written(form: str) -> str:
        program = (
            "import logging, sys; from qwen35_operator import logs; logs.begin(sys.argv[1], verbose=False);"
            "logging.getLogger('qwen35_operator.x').info('shown'); logging.getLogger('other').info('not shown')"
        )
        done = subprocess.run([sys.executable, "-c", program, form], capture_output=True, text=True, check=True)
        return done.stderr

    assert json.loads(written("json"))["message"] == "shown"
    assert written("text").endswith(" INFO qwen35_operator.x: shown\n")
    assert written("text").count("\n") == 1
