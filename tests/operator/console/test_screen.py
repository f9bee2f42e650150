"""What a person reads, for every phase of a training, as files to read.

After a change that is meant: UPDATE_GOLDEN=1 pytest tests/operator/console/test_screen.py, which fails, and read the difference.
"""

import io
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from qwen35_operator.console.line import line
from qwen35_operator.console.screen import view
from qwen35_operator.console.table import table
from tests.operator.console.scenes import SCENES, queued, running, starting, succeeded, suspending
from tests.operator.golden import compare

GOLDEN = Path(__file__).parent / "golden"
COLUMNS, LINES = 80, 24


def drawn(what: RenderableType, width: int = COLUMNS) -> str:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(what)
    return "".join(f"{text.rstrip()}\n" for text in file.getvalue().splitlines())


@pytest.mark.parametrize("name", SCENES)
def test_the_screen_is_that_of_the_golden_file(name):
    scene = SCENES[name]()
    text = f"{drawn(view(scene.seen, scene.now))}\n{line(scene.seen, scene.now)}\n"
    compare(text, GOLDEN / f"{name}.txt")


def test_there_is_no_golden_file_without_its_scene():
    assert {file.stem for file in GOLDEN.iterdir()} == {*SCENES, "table"}


@pytest.mark.parametrize("name", SCENES)
def test_it_is_one_screen(name):
    scene = SCENES[name]()
    lines = drawn(view(scene.seen, scene.now)).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


def test_trouble_stands_below_what_was_seen_before():
    scene = running()
    text = drawn(view(scene.seen, scene.now, "The API server does not answer"))
    assert text.startswith(drawn(view(scene.seen, scene.now)))
    assert text.endswith("\nThe API server does not answer\n")


def test_many_trainings_are_a_line_each():
    scenes = [running(), queued(), starting(), suspending(), succeeded()]
    text = drawn(table([scene.seen for scene in scenes], scenes[0].now, namespaces=True))
    compare(text, GOLDEN / "table.txt")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert "NAMESPACE" not in drawn(table([scenes[0].seen], scenes[0].now, namespaces=False))
