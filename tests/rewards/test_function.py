import sys
from pathlib import Path

import pytest

from qwen35_trainer.data import Prompt
from qwen35_trainer.rewards.reward import Response, RewardSetupError

CODE = """
import asyncio
import neighbour

def length(prompt, response, answer, metadata):
    return len(response)

def sees(prompt, response, answer, metadata):
    messages = isinstance(prompt, list) and prompt[0]["content"] == "hello"
    return float(messages and response == "r" and answer is None and metadata == {"level": 3})

def imported(prompt, response, answer, metadata):
    return neighbour.VALUE

def two(prompt, response):
    return 0

async def later(prompt, response, answer, metadata):
    await asyncio.sleep(0)
    return len(response)

async def never(prompt, response, answer, metadata):
    await asyncio.Event().wait()

async def own_timeout(prompt, response, answer, metadata):
    raise TimeoutError("the judge did not answer")

async def leaves(prompt, response, answer, metadata):
    raise SystemExit(1)

async def nothing(prompt, response, answer, metadata):
    pass

class Judge:
    async def __call__(self, prompt, response, answer, metadata):
        return 7

judge = Judge()
number = 3
"""


@pytest.fixture(autouse=True)
def manifest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "neighbour", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "Function", "function": f"mine:{name}", "name": name, **fields}


async def test_plain_and_coroutine_functions_score_side_by_side(build, complete) -> None:
    scorer = build(function("length"), function("imported"), function("later", weight=2.0), function("judge"))
    scored = await scorer.score(complete("four"))
    assert scored.parts == {"length": 4.0, "imported": 5.0, "later": 4.0, "judge": 7.0}
    assert scored.value == 4 + 5 + 2 * 4 + 7


async def test_a_function_sees_the_prompt_as_the_data_has_it(build) -> None:
    prompt = Prompt("s/0", "s", ({"role": "user", "content": "hello"},), None, {"level": 3})
    assert (await build(function("sees")).score(Response(prompt, "r", 1, truncated=False))).value == 1.0


async def test_a_coroutine_that_never_returns_is_cancelled(build, complete) -> None:
    scorer = build(function("never", timeoutSeconds=0.2))
    scored = await scorer.score(complete("x"))
    assert scored.errors == {"never": "Timeout: no score within timeoutSeconds 0.2; the call was cancelled"}
    assert scored.timeouts == {"never"}


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own_timeout", "TimeoutError: the judge did not answer"),
        ("leaves", "SystemExit: 1"),
        ("nothing", "NotANumber: returned None (NoneType), not a number"),
    ],
)
async def test_a_coroutine_that_fails_is_an_error_and_no_timeout(build, complete, name: str, error: str) -> None:
    scorer = build(function(name))
    scored = await scorer.score(complete("x"))
    assert (scored.errors, scored.timeouts) == ({name: error}, frozenset())


def test_all_functions_that_cannot_be_loaded_are_reported_together(build, tmp_path: Path) -> None:
    with pytest.raises(RewardSetupError) as raised:
        build(
            function("two"),
            function("lenght"),
            function("number"),
            {"type": "Function", "function": "absent:f", "name": "absent"},
            {"type": "Function", "function": "broken:f", "name": "broken"},
        )
    two, misspelt, number, absent, broken = raised.value.problems
    assert "mine:two(prompt, response) cannot be called as function(prompt, response, answer, metadata)" in two
    assert f"{tmp_path}/mine.py has no 'lenght'; it has length" in misspelt
    assert "mine:number is a int, not a function" in number
    assert f"absent:f: module absent was not found in the manifest's folder {tmp_path} or on sys.path" in absent
    assert "importing broken failed: ModuleNotFoundError: No module named 'no_such_module'" in broken
    assert 'broken.py", line 1' in broken
