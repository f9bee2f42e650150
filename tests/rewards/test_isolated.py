import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.rewards.isolated import IsolatedFunction
from qwen35_trainer.rewards.reward import RewardError, RewardTimeoutError
from tests.patience import PATIENCE

CODE = """
import os, subprocess, sys, time

def load(name, pid_file=None):
    if pid_file:
        with open(pid_file, "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
    return globals()[name]

def double(number):
    return 2 * number

def loop():
    while True:
        pass

def tell_and_loop():
    print(os.getpid(), flush=True)
    loop()

def big_number():
    return len(str(9 ** 9 ** 8))

def die():
    os._exit(3)

def leave():
    sys.exit("bye")

def modules(*names):
    return sum(name in sys.modules for name in names)

def returns(value):
    return {"nan": float("nan"), "none": None, "text": "1", "true": True}[value]
"""


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_ended(process: psutil.Process) -> None:
    while not has_ended(process):
        time.sleep(0.01)


def kill_child(process_id: int) -> None:
    """Returns when the last of its threads is gone. The process that started it still has to reap it."""
    os.kill(process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., IsolatedFunction]]:
    (tmp_path / "scored.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[IsolatedFunction] = []

    def make(*load: str, seconds: float = 20.0) -> IsolatedFunction:
        made.append(IsolatedFunction("scored:load", load, seconds))
        return made[-1]

    yield make
    for function in made:
        function.close()


async def test_calls_are_answered_in_order_by_one_process(isolated) -> None:
    function = isolated("double")
    assert await asyncio.gather(*(function.call(number) for number in range(5))) == [0.0, 2.0, 4.0, 6.0, 8.0]
    first = function.process_id
    assert await function.call(21) == 42.0
    assert function.process_id == first != os.getpid()


@pytest.mark.parametrize("name", ["loop", "big_number"])
async def test_a_call_that_never_returns_is_killed(isolated, name: str) -> None:
    function = isolated(name, seconds=0.5)
    function.load().result()
    worker = function.process_id
    with pytest.raises(RewardTimeoutError, match=r"no score within timeoutSeconds 0\.5"):
        await function.call()
    assert not psutil.pid_exists(worker)
    assert function.process_id is None


async def test_what_a_killed_call_started_is_killed_with_it(isolated, tmp_path: Path) -> None:
    function = isolated("loop", str(tmp_path / "pid"), seconds=0.5)
    function.load().result()
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    assert not has_ended(started)
    with pytest.raises(RewardTimeoutError):
        await function.call()
    wait_until_ended(started)


async def test_a_new_worker_takes_the_next_call_after_a_killed_one(isolated) -> None:
    function = isolated("loop", seconds=0.5)
    for _ in range(2):
        with pytest.raises(RewardTimeoutError):
            await function.call()


async def test_a_worker_that_dies_is_reported_with_its_exit_code_and_replaced(isolated) -> None:
    function = isolated("die")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"the worker process died \(exit code 3\)"):
            await function.call()


async def test_a_worker_killed_between_calls_is_replaced(isolated) -> None:
    function = isolated("double")
    assert await function.call(1) == 2.0
    kill_child(function.process_id)
    assert await function.call(2) == 4.0


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("nan", "NotANumber", "returned nan; a score is a finite number"),
        ("none", "NotANumber", r"returned None \(NoneType\), not a number"),
        ("text", "NotANumber", r"returned '1' \(str\), not a number"),
        ("absent", "KeyError", "'absent'"),
    ],
)
async def test_a_result_that_is_not_a_number_is_an_error(isolated, value: str, kind: str, message: str) -> None:
    with pytest.raises(RewardError, match=message) as raised:
        await isolated("returns").call(value)
    assert raised.value.kind == kind


async def test_true_is_one(isolated) -> None:
    assert await isolated("returns").call("true") == 1.0


async def test_leaving_the_process_is_an_error_like_any_other(isolated) -> None:
    with pytest.raises(RewardError, match="bye") as raised:
        await isolated("leave").call()
    assert raised.value.kind == "SystemExit"
    assert "in leave" in raised.value.details


async def test_the_worker_imports_no_heavy_library(isolated) -> None:
    assert await isolated("modules").call("torch", "transformers", "ray", "pytest") == 0.0


async def test_arguments_that_cannot_be_sent_are_an_error(isolated) -> None:
    with pytest.raises(RewardError, match="cannot be sent to the worker"):
        await isolated("double").call(lambda: 1)


async def test_closing_ends_the_worker_and_fails_calls_under_way(isolated) -> None:
    function = isolated("loop")
    function.load().result()
    worker = function.process_id
    pending = [asyncio.ensure_future(function.call()) for _ in range(3)]
    await asyncio.sleep(0)
    function.close()
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert all(isinstance(result, RewardError) for result in results)
    assert not psutil.pid_exists(worker)
    with pytest.raises(RewardError, match="closed"):
        await function.call()


def test_a_function_that_cannot_be_loaded_says_why(isolated) -> None:
    with pytest.raises(RewardError, match="'absent'") as raised:
        isolated("absent").load().result()
    assert raised.value.kind == "KeyError"


def test_no_worker_outlives_a_process_that_forgets_to_close(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(CODE)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from qwen35_trainer.rewards.isolated import IsolatedFunction\n"
        "function = IsolatedFunction('scored:load', ('double',), 5.0)\n"
        "function.load().result()\n"
        "print(function.process_id)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    assert not psutil.pid_exists(int(ended.stdout))


def test_a_call_ends_even_when_its_caller_was_killed(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(CODE)
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from qwen35_trainer.rewards.isolated import IsolatedFunction\n"
        "function = IsolatedFunction('scored:load', ('tell_and_loop',), 60.0)\n"
        "asyncio.run(function.call())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        worker = psutil.Process(int(caller.stdout.readline()))
        assert worker.ppid() == caller.pid
        caller.kill()
    wait_until_ended(worker)
