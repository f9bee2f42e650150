"""What a person reads, for every phase of a training, as files to read.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/operator/console/test_screen.py, which fails, and read the difference.
"""

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from qwen35_operator.console.screen import draw
from qwen35_operator.console.status_line import line
from qwen35_operator.console.training_table import table
from qwen35_operator.console.training_view import TrainingView, latest_warnings
from qwen35_operator.status.times import parse
from tests.operator.console.example_trainings import EXAMPLES, queued, running, starting, succeeded, suspending
from tests.operator.golden import compare

GOLDEN = Path(__file__).parent / "golden"
COLUMNS, LINES = 80, 24
TIME = "2026-01-01T00:00:00Z"


def drawn(what: RenderableType, width: int = COLUMNS) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(what)
    return "".join(f"{text.rstrip()}\n" for text in file.getvalue().splitlines())


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_screen_is_that_of_the_golden_file(name):
    example = EXAMPLES[name]()
    text = f"{drawn(draw(example.view, example.now))}\n{line(example.view, example.now)}\n"
    compare(text, GOLDEN / f"{name}.txt")


def test_there_is_no_golden_file_without_its_scene():
    assert {file.stem for file in GOLDEN.iterdir()} == {*EXAMPLES, "table"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_one_screen(name):
    example = EXAMPLES[name]()
    lines = drawn(draw(example.view, example.now)).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


def test_trouble_stands_below_what_was_seen_before():
    example = running()
    text = drawn(draw(example.view, example.now, "The API server does not answer"))
    assert text.startswith(drawn(draw(example.view, example.now)))
    assert text.endswith("\nThe API server does not answer\n")


def test_many_trainings_are_a_line_each():
    scenes = [running(), queued(), starting(), suspending(), succeeded()]
    text = drawn(table([example.view for example in scenes], scenes[0].now, namespaces=True))
    compare(text, GOLDEN / "table.txt")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "NAMESPACE" not in drawn(table([scenes[0].view], scenes[0].now, namespaces=False))


HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b]52;c;ZWNobw==\x07\x9b31m\u202egnp.exe [bold red]hi[/]"
"""Renames the window, clears it, writes to the clipboard, colours text, reverses text; and markup of rich."""


def test_no_text_of_a_trainer_or_a_user_controls_the_terminal():
    condition = {"type": "Ready", "status": "True", "reason": "Running", "message": HOSTILE, "lastTransitionTime": TIME}
    attempt = {"number": 1, "job": HOSTILE, "outcome": "Failed", "reason": HOSTILE, "message": HOSTILE}
    status = {
        "state": "Running",
        "conditions": [condition],
        "attempts": [attempt],
        "lastCheckpoint": {"uri": HOSTILE, "update": 1, "time": TIME},
    }
    metadata = {"name": "x", "namespace": "n", "uid": "u", "generation": 1, "creationTimestamp": TIME}
    event = {"involvedObject": {"uid": "u"}, "metadata": metadata, "reason": HOSTILE, "message": HOSTILE}
    spec = {"mode": HOSTILE, "accelerator": {"profile": HOSTILE}}
    view = TrainingView.of({"metadata": metadata, "spec": spec, "status": status}, latest_warnings([event], "u", 3))
    now = parse(TIME)
    for text in (drawn(draw(view, now)), drawn(table([view], now, namespaces=True)), line(view, now)):
        assert not any(sign in text for sign in "\x1b\x07\x9b\u202e"), ascii(text)
    assert "[bold red]hi[/]" in drawn(draw(view, now), width=400)
