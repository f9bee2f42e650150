"""Scoring in processes. What a reward may do is tested without a scoring process, next to this file."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from qwen35_trainer.data import Prompt, character_tokenizer
from qwen35_trainer.manifest.rewards import RewardSpec
from qwen35_trainer.rewards import scorer as scorer_module
from qwen35_trainer.rewards import scoring as scoring_module
from qwen35_trainer.rewards.response_decoder import ResponseDecoder
from qwen35_trainer.rewards.reward import CombinedScore, ResponseTokens, RewardFailed, RewardSetupError
from qwen35_trainer.rewards.reward_settings import ProcessLimits, RewardsSetup
from qwen35_trainer.rewards.scoring import Scoring
from tests.patience import PATIENCE

from .test_isolated import has_ended, wait_until_ended

TOKENIZER = character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz äß€🙂")
CODE = """
import os, subprocess, sys, time

def number(prompt, response, answer, metadata):
    return float(response[:5])

def fails(prompt, response, answer, metadata):
    raise KeyError(response)

def appears(prompt, response, answer, metadata):
    while not os.path.exists(metadata["path"]):
        time.sleep(0.005)
    return 1

def prints(prompt, response, answer, metadata):
    print("scoring", response)
    print("to stderr:", response, file=sys.stderr, flush=True)
    os.system("true")
    return 1

def starts_another(prompt, response, answer, metadata):
    child = subprocess.Popen(["sleep", "1000"])
    print(child.pid, os.getpid(), os.getppid(), flush=True)
    time.sleep(1000)
"""

type Open = Callable[..., Awaitable[Scoring]]


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[Open]:
    """Starts scoring with functions of CODE and other rewards, and ends it."""
    (tmp_path / "mine.py").write_text(CODE)
    made: list[Scoring] = []

    async def start(
        *rewards: dict[str, object], trial: int = 0, processes: int = 1, functions: int = 1, logs: Path | None = None
    ) -> Scoring:
        setup = RewardsSetup.of([RewardSpec.model_validate(reward) for reward in rewards], (), tmp_path)
        made.append(Scoring(setup, ProcessLimits(processes, functions), trial=trial, logs=logs))
        await made[-1].__aenter__()
        await made[-1].open(ResponseDecoder.of(TOKENIZER))
        return made[-1]

    yield start
    for scoring in made:
        await scoring.close()


def function(name: str, **fields: object) -> dict[str, object]:
    return {"type": "Function", "name": name, "function": f"mine:{name}", **fields}


async def score(
    scoring: Scoring, *texts: str, answer: str | None = None, in_trial: bool = True, **metadata: object
) -> tuple[CombinedScore, ...]:
    responses = [
        ResponseTokens(np.array([*TOKENIZER.encode(text), 2], np.int32), truncated=False) if text else NO_TOKENS
        for text in texts
    ]
    return await scoring.score_group(Prompt("s/0", "s", "?", answer, metadata), responses, in_trial=in_trial)


NO_TOKENS = ResponseTokens(np.empty(0, np.int32), truncated=True)


async def test_each_response_gets_its_own_score_in_order(opened: Open) -> None:
    scoring = await opened(function("number", weight=0.5), {"type": "ExactMatch"})
    groups = await asyncio.gather(
        *(score(scoring, str(number), "0", "12345" * 3000, str(number + 1), answer="7") for number in range(20))
    )
    for number, scored in enumerate(groups):
        numbers = [each.parts["number"] for each in scored]
        assert numbers == [number, 0.0, 12345.0, number + 1]
        assert [each.parts["ExactMatch"] for each in scored] == [number == 7, 0.0, 0.0, number + 1 == 7]
        assert [each.value for each in scored] == [0.5 * a + b for a, b in (each.parts.values() for each in scored)]


async def test_responses_are_decoded_without_special_tokens_whatever_their_characters(opened: Open) -> None:
    scoring = await opened({"type": "ExactMatch"})
    text = "äß€🙂 a"
    assert [each.value for each in await score(scoring, text, "", "b", answer=text)] == [1.0, 0.0, 0.0]


async def test_responses_are_decoded_and_matched_in_a_process_of_their_own(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 characters with many matches take tens of milliseconds, in which the driver would answer no replica."""

    def forbidden(*_: object) -> object:
        raise AssertionError("this is the process of the driver")

    for owner, name in ((ResponseDecoder, "load"), (scorer_module, "exact_match_grader")):
        monkeypatch.setattr(owner, name, forbidden)
    scoring = await opened({"type": "ExactMatch", "extract": r"\d+"})
    many = "12 a 34 b 46 c " * 7000
    assert [each.value for each in await score(scoring, many + "7", many, answer="7")] == [1.0, 0.0]


async def test_a_group_whose_reward_hangs_delays_no_other_group(opened: Open, tmp_path: Path) -> None:
    scoring = await opened(function("appears", timeoutSeconds=1.0), functions=4)
    hanging = asyncio.ensure_future(score(scoring, "a", "b", path=str(tmp_path / "absent")))
    groups = [await score(scoring, "c", "d", path=str(tmp_path)) for _ in range(3)]
    assert {each.value for scored in groups for each in scored} == {1.0}
    late = "Timeout: no score within timeoutSeconds 1; the call was ended"
    assert [each.errors for each in await hanging] == [{"appears": late}] * 2


async def test_the_groups_of_a_scoring_process_that_dies_are_scored_by_another_one(
    opened: Open, tmp_path: Path
) -> None:
    scoring = await opened(function("appears", timeoutSeconds=PATIENCE), functions=4)
    [first] = scoring.process_ids
    group = asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "file")))
    await asyncio.sleep(0.05)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "file").touch()
    assert [each.value for each in await group] == [1.0]
    assert scoring.process_ids != (first,)


async def test_the_death_of_a_scoring_process_is_logged_once_however_many_groups_it_scores(
    opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scoring = await opened(function("appears", timeoutSeconds=PATIENCE), functions=4)
    groups = [asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "file"))) for _ in range(20)]
    for _ in range(2):
        [process_id] = scoring.process_ids
        while sum(place.groups for place in scoring._places) < len(groups):  # noqa: ASYNC110  # no event is set
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # the groups are sent
        os.kill(process_id, signal.SIGKILL)
        while scoring.process_ids in ((), (process_id,)):  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.005)
        groups.append(asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "file"))))
    (tmp_path / "file").touch()
    await asyncio.gather(*groups)
    assert [record.getMessage() for record in caplog.records if "scoring process ended" in record.getMessage()] == [
        "a scoring process ended (signal SIGKILL); its groups are scored again, once"
    ] * 2


async def test_a_group_that_two_scoring_processes_did_not_survive_has_failed(opened: Open, tmp_path: Path) -> None:
    scoring = await opened(function("appears", timeoutSeconds=PATIENCE))
    group = asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "absent")))
    killed: set[int] = set()
    while not group.done():
        for process_id in set(scoring.process_ids) - killed:
            await asyncio.sleep(0.05)
            os.kill(process_id, signal.SIGKILL)
            killed.add(process_id)
        await asyncio.sleep(0.005)
    dead = "WorkerDied: the scoring process died (signal SIGKILL), and the one after it"
    assert [each.errors for each in group.result()] == [{"appears": dead}]
    assert [each.value for each in await score(scoring, "a", path=str(tmp_path))] == [1.0]


async def test_a_scoring_process_that_is_silent_is_ended(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_module, "ALIVE_SECONDS", 0.1)
    scoring = await opened({"type": "ExactMatch"})
    [first] = scoring.process_ids
    os.kill(first, signal.SIGSTOP)
    monkeypatch.setattr(scoring_module, "SILENT_SECONDS", 0.3)
    assert [each.value for each in await score(scoring, "a", answer="a")] == [1.0]
    assert first not in scoring.process_ids


async def test_two_scoring_processes_share_the_groups(opened: Open, tmp_path: Path) -> None:
    scoring = await opened(function("appears"), processes=2)
    groups = [asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "file"))) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert [place.groups for place in scoring._places] == [1, 1]
    (tmp_path / "file").touch()
    assert [each.value for [each] in await asyncio.gather(*groups)] == [1.0, 1.0]


async def test_all_problems_of_the_rewards_are_raised_together_and_no_process_stays(
    opened: Open, tmp_path: Path
) -> None:
    with pytest.raises(RewardSetupError) as raised:
        await opened(function("number"), function("absent"), {"type": "ExactMatch", "extract": "("})
    assert [problem.split(":")[0] for problem in raised.value.problems] == ["reward absent", "reward ExactMatch"]


async def test_closing_ends_every_process_and_groups_under_way_fail(opened: Open, tmp_path: Path) -> None:
    others = set(psutil.Process().children(recursive=True))
    scoring = await opened(function("appears"))
    processes = set(psutil.Process().children(recursive=True)) - others
    assert len(processes) >= 2
    group = asyncio.ensure_future(score(scoring, "a", path=str(tmp_path / "absent")))
    await asyncio.sleep(0)
    await scoring.close()
    assert [each.errors for each in await group] == [{"appears": "Closed: scoring is closed"}]
    assert all(has_ended(process) for process in processes)


async def test_the_first_responses_must_get_a_score_and_those_of_evaluations_do_not_count(opened: Open) -> None:
    scoring = await opened(function("fails"), trial=3)
    assert [each.value for each in await score(scoring, *"abcde", in_trial=False)] == [0.0] * 5
    with pytest.raises(RewardFailed, match=r"The first one: reward fails, prompt s/0: KeyError: 'f'"):
        await score(scoring, *"fgh")


async def test_the_first_traceback_of_a_kind_reaches_the_log_of_the_driver(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    scoring = await opened(function("fails"))
    await score(scoring, *"ab")
    await score(scoring, *"cd")
    [record] = caplog.records
    assert "reward fails failed on prompt s/0: KeyError: 'a'" in record.getMessage()
    assert 'mine.py", line 8, in fails' in record.getMessage()


async def test_what_functions_print_is_in_the_log_folder(opened: Open, tmp_path: Path, capfd) -> None:
    scoring = await opened(function("prints"), logs=tmp_path / "logs")
    await score(scoring, "a", "b")
    await scoring.close()
    printed = (tmp_path / "logs" / "rewards-0.log").read_text().splitlines()
    assert sorted(printed) == ["scoring a", "scoring b", "to stderr: a", "to stderr: b"]
    assert not any("scoring" in text or "stderr" in text for text in capfd.readouterr())


async def test_metadata_that_cannot_be_sent_is_an_error(opened: Open) -> None:
    scoring = await opened({"type": "ExactMatch"})
    [scored] = await score(scoring, "a", answer="a", function=lambda: 1)
    assert "Unsendable: the prompt's metadata cannot be sent" in scored.errors["ExactMatch"]


def test_nothing_outlives_a_driver_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    code = (
        "import asyncio, sys, json\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from qwen35_trainer.rewards.response_decoder import ResponseDecoder\n"
        "from qwen35_trainer.rewards.reward_settings import ProcessLimits\n"
        "from qwen35_trainer.rewards.reward import ResponseTokens\n"
        "from qwen35_trainer.rewards.reward_settings import RewardSettings, RewardsSetup, RewardTerm\n"
        "from qwen35_trainer.rewards.scoring import Scoring\n"
        "from qwen35_trainer.data.prompt import Prompt\n"
        "reward = RewardSettings('r', 'Function', None, 'mine:starts_another', 1000.0, sys.argv[1])\n"
        "async def main():\n"
        "    setup = RewardsSetup((reward,), (RewardTerm('r', 1.0, 'Zero'),))\n"
        "    async with Scoring(setup, ProcessLimits()) as scoring:\n"
        "        await scoring.open(ResponseDecoder(json.loads(sys.argv[2])))\n"
        "        tokens = ResponseTokens(np.array([3], np.int32), False)\n"
        "        await scoring.score_group(Prompt('s/0', 's', ''), [tokens], in_trial=False)\n"
        "asyncio.run(main())\n"
    )
    backend = json.dumps(ResponseDecoder.of(TOKENIZER).backend)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), backend], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        started, of_function, of_scoring = map(psutil.Process, map(int, driver.stdout.readline().split()))
        assert of_scoring.ppid() == driver.pid
        driver.kill()
    for process in (started, of_function, of_scoring):
        wait_until_ended(process)
