import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen35_trainer.data import Prompt
from qwen35_trainer.rewards import isolated
from qwen35_trainer.rewards.function import load_function
from qwen35_trainer.rewards.reward import PromptFields, Response, RewardError, RewardSetupError, as_score
from tests.patience import PATIENCE

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

async def blocks(prompt, response, answer, metadata):
    if response == "blocks":
        import time
        time.sleep(1000)
    return 1

async def ignores(prompt, response, answer, metadata):
    import asyncio
    while response == "ignores":
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
    return 1

async def nothing(prompt, response, answer, metadata):
    pass

class Judge:
    async def __call__(self, prompt, response, answer, metadata):
        return 7

judge = Judge()
number = 3
"""


@pytest.fixture(autouse=True)
def manifest_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "neighbour.py").write_text("VALUE = 5\n")
    (tmp_path / "broken.py").write_text("import no_such_module\n")


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "Function", "function": f"mine:{name}", "name": name, **fields}


async def test_plain_and_coroutine_functions_score_side_by_side(build, complete) -> None:
    scorer = await build(function("length"), function("imported"), function("later", weight=2.0), function("judge"))
    scored = await scorer.score(complete("four"))
    assert scored.parts == {"length": 4.0, "imported": 5.0, "later": 4.0, "judge": 7.0}
    assert scored.value == 4 + 5 + 2 * 4 + 7


async def test_a_function_sees_the_prompt_as_the_data_has_it(build) -> None:
    prompt = Prompt("s/0", "s", ({"role": "user", "content": "hello"},), None, {"level": 3})
    scorer = await build(function("sees"))
    response = Response(PromptFields.of(prompt), "r", 1, truncated=False)
    assert (await scorer.score(response)).value == 1.0


async def test_a_coroutine_that_never_returns_is_cancelled(build, complete) -> None:
    scorer = await build(function("never", timeoutSeconds=0.2))
    scored = await scorer.score(complete("x"))
    assert scored.errors == {"never": "Timeout: no score within timeoutSeconds 0.2; the call was cancelled"}
    assert scored.timeouts == {"never"}


@pytest.mark.parametrize("name", ["blocks", "ignores"])
async def test_a_coroutine_that_cannot_be_cancelled_is_killed_and_another_process_takes_the_next_call(
    build, complete, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(isolated, "BLOCKED_SECONDS", 0.1)
    scorer = await build(function(name, timeoutSeconds=0.2))
    scored = await scorer.score(complete(name))
    reason = "the function blocked its event loop or ignored its cancellation, and its process was ended"
    assert scored.errors == {name: f"Timeout: no score within timeoutSeconds 0.2; {reason}"}
    assert (await scorer.score(complete("x"))).value == 1.0


async def test_calls_of_a_coroutine_run_at_the_same_time(build, complete, tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(
        "import asyncio\n"
        "waiting = []\n"
        "async def score(prompt, response, answer, metadata):\n"
        "    waiting.append(asyncio.Event())\n"
        "    if len(waiting) == 3:\n"
        "        [event.set() for event in waiting]\n"
        "    await waiting[-1].wait()\n"
        "    return 1\n"
    )
    scorer = await build({"type": "Function", "function": "meeting:score", "timeoutSeconds": PATIENCE})
    scored = await asyncio.gather(*(scorer.score(complete(text)) for text in "abc"))
    assert [each.value for each in scored] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("own_timeout", "TimeoutError: the judge did not answer"),
        ("leaves", "SystemExit: 1"),
        ("nothing", "NotANumber: returned None (NoneType), not a number"),
    ],
)
async def test_a_coroutine_that_fails_is_an_error_and_no_timeout(build, complete, name: str, error: str) -> None:
    scorer = await build(function(name))
    scored = await scorer.score(complete("x"))
    assert (scored.errors, scored.timeouts) == ({name: error}, frozenset())


def test_the_manifests_folder_is_searched_first_though_the_path_contains_it_later(tmp_path: Path, monkeypatch) -> None:
    folders = [str(tmp_path / name) for name in ("other", "manifest")]
    for folder in folders:
        Path(folder).mkdir()
        code = "def score(prompt, response, answer, metadata):\n    return 0"
        (Path(folder) / "in_two_folders.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*folders, *sys.path])
    function = load_function("in_two_folders:score", folders[1])
    del sys.modules["in_two_folders"]
    assert function.__code__.co_filename == f"{folders[1]}/in_two_folders.py"


async def test_all_functions_that_cannot_be_loaded_are_reported_together(build, tmp_path: Path) -> None:
    with pytest.raises(RewardSetupError) as raised:
        await build(
            function("two"),
            function("lenght"),
            function("number"),
            {"type": "Function", "function": "absent:f", "name": "absent"},
            {"type": "Function", "function": "broken:f", "name": "broken"},
        )
    two, misspelt, number, absent, broken = raised.value.problems
    assert "mine:two(prompt, response) cannot be called as function(prompt, response, answer, metadata)" in two
    assert f"{tmp_path}/mine.py has no 'lenght' (did you mean length?); it has length, " in misspelt
    assert "mine:number is a int, not a function" in number
    assert f"absent:f: module absent was not found in the manifest's folder {tmp_path} or on sys.path" in absent
    assert "importing broken failed: ModuleNotFoundError: No module named 'no_such_module'" in broken
    assert 'broken.py", line 1' in broken


def test_a_function_that_a_module_lacks_is_refused_with_similar_and_other_names(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = [f"score{number}" for number in range(12)] + ["string"]
    (tmp_path / "with_many.py").write_text("".join(f"def {name}(a, b, c, d): pass\n" for name in names))
    with pytest.raises(RewardError) as similar:
        load_function("with_many:strin", str(tmp_path))
    listed = "; it has string, score0, score1, score2, score3, score4, score5, score6, score7, score8 and 3 more"
    assert str(similar.value).endswith(f"/with_many.py has no 'strin' (did you mean string?){listed}")
    with pytest.raises(RewardError) as other:
        load_function("with_many:xyz", str(tmp_path))
    listed = "; it has score0, score1, score2, score3, score4, score5, score6, score7, score8, score9 and 3 more"
    assert str(other.value).endswith(f"/with_many.py has no 'xyz'{listed}")


@pytest.mark.parametrize("value", [1e16, -1e200, 10**400])
def test_a_score_whose_square_does_not_fit_into_float32_is_refused_with_the_value(value):
    with pytest.raises(RewardError, match=r"a score is at most 1e\+15 in magnitude") as refused:
        as_score(value)
    assert refused.value.kind == "NotANumber"


def test_a_truth_value_of_numpy_is_a_score():
    assert (as_score(np.True_), as_score(np.bool_(False))) == (1.0, 0.0)


def test_the_name_of_an_exception_reaches_logs_without_control_characters():
    assert RewardError("message", kind="\x1b[31mE").kind == "\\x1b[31mE"
