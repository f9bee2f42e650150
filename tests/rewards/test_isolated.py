import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from qwen35_trainer.rewards import isolated as isolated_module
from qwen35_trainer.rewards.isolated import MAX_REPLY_BYTES, IsolatedFunction, most_processes
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

def appears(path):
    while not os.path.exists(path):
        time.sleep(0.005)
    return 1

def slowly(seconds):
    time.sleep(seconds)
    return 1

async def first_dies(path, dies):
    if os.path.exists(path):
        return 1
    if dies:
        open(path, "x").close()
        os._exit(3)
    import asyncio
    await asyncio.Event().wait()

async def dies():
    os._exit(3)

def forks():
    child = os.fork()
    if child == 0:
        return 777
    os.waitpid(child, 0)
    return 1

def loop():
    while True:
        pass

def tell_and_loop():
    print(os.getpid(), flush=True)
    loop()

def starts_and_loops(path, command):
    subprocess.run(["sh", "-c", command + " & echo $! > " + path + ".new"], start_new_session=True)
    os.rename(path + ".new", path)
    loop()

def replies_too_much(size):
    import struct
    for descriptor in os.listdir("/proc/self/fd"):
        if os.path.exists(path := "/proc/self/fd/" + descriptor) and os.readlink(path).startswith("socket:"):
            os.write(int(descriptor), struct.pack("<QI", 2, size))
    loop()

def starts_and_dies(path):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open(path, "w") as file:
        file.write(str(child.pid))
    die()

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


def number_has_ended(process_id: int) -> bool:
    return not psutil.pid_exists(process_id) or has_ended(psutil.Process(process_id))


def wait_until_ended(process: psutil.Process) -> None:
    while not has_ended(process):
        time.sleep(0.01)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110  # the processes set no event
            await asyncio.sleep(0.005)


def kill_child(process_id: int) -> None:
    """Returns when the last of its threads is gone. The process that started it still has to reap it."""
    os.kill(process_id, signal.SIGKILL)
    os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)


@pytest.fixture
async def isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., IsolatedFunction]]:
    (tmp_path / "scored.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    made: list[IsolatedFunction] = []

    def make(*load: str, seconds: float = 20.0, processes: int = 1) -> IsolatedFunction:
        made.append(IsolatedFunction("scored:load", load, seconds, processes=processes))
        return made[-1]

    yield make
    for function in made:
        await function.close()


@pytest.fixture
def grows_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_module, "GROW_SECONDS", 0.02)


async def test_calls_are_answered_in_order_by_one_process(isolated) -> None:
    function = isolated("double")
    assert await asyncio.gather(*(function.call(number) for number in range(5))) == [0.0, 2.0, 4.0, 6.0, 8.0]
    first = function.process_ids
    assert await function.call(21) == 42.0
    assert function.process_ids == first != (os.getpid(),)


@pytest.mark.parametrize("name", ["loop", "big_number"])
async def test_a_call_that_never_returns_is_killed(isolated, name: str) -> None:
    function = isolated(name, seconds=0.5)
    await function.load()
    [worker] = function.process_ids
    with pytest.raises(RewardTimeoutError, match=r"no score within timeoutSeconds 0\.5"):
        await function.call()
    assert not psutil.pid_exists(worker)
    assert not function.process_ids


async def test_what_a_killed_call_started_is_killed_with_it(isolated, tmp_path: Path) -> None:
    function = isolated("loop", str(tmp_path / "pid"), seconds=0.5)
    await function.load()
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    assert not has_ended(started)
    with pytest.raises(RewardTimeoutError):
        await function.call()
    wait_until_ended(started)


async def test_a_reply_that_is_too_long_is_not_reported_as_a_death(isolated) -> None:
    with pytest.raises(RewardError) as raised:
        await isolated("replies_too_much").call(MAX_REPLY_BYTES + 1)
    assert raised.value.kind == "ReplyTooLong"
    assert str(raised.value) == "a message of 1048577 bytes; at most 1048576 are accepted as the reply to a call"


@pytest.mark.parametrize("command", ["sleep 1000", "setsid sleep 1000", "sh -c 'sleep 1000; true'"])
async def test_what_a_killed_call_started_in_a_session_of_its_own_is_killed_with_it(
    isolated, tmp_path: Path, command: str
) -> None:
    """Its parent has ended, too, so that neither a process group nor the tree of processes leads to it."""
    function = isolated("starts_and_loops", seconds=0.5)
    with pytest.raises(RewardTimeoutError):
        await function.call(str(tmp_path / "pid"), command)
    assert number_has_ended(int((tmp_path / "pid").read_text()))


async def test_what_a_process_that_died_started_is_killed(isolated, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="exit code 3"):
        await isolated("starts_and_dies").call(str(tmp_path / "pid"))
    assert number_has_ended(int((tmp_path / "pid").read_text()))


async def test_a_killed_call_leaves_alone_what_other_processes_started(isolated, tmp_path: Path) -> None:
    other = isolated("double", str(tmp_path / "pid"))
    assert await other.call(1) == 2.0
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    with pytest.raises(RewardTimeoutError):
        await isolated("loop", seconds=0.5).call()
    assert not has_ended(started)
    assert await other.call(1) == 2.0


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


async def test_a_child_that_the_function_forks_does_not_answer_in_its_place(isolated) -> None:
    function = isolated("forks")
    assert [await function.call() for _ in range(2)] == [1.0, 1.0]


async def test_a_worker_killed_between_calls_is_replaced(isolated) -> None:
    function = isolated("double")
    assert await function.call(1) == 2.0
    [worker] = function.process_ids
    kill_child(worker)
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
    await function.load()
    [worker] = function.process_ids
    pending = [asyncio.ensure_future(function.call()) for _ in range(3)]
    await asyncio.sleep(0)
    await function.close()
    results = await asyncio.gather(*pending, return_exceptions=True)
    assert [str(result) for result in results] == ["the reward is closed"] * 3
    assert not psutil.pid_exists(worker)
    with pytest.raises(RewardError, match="closed"):
        await function.call()


async def test_a_function_that_cannot_be_loaded_says_why(isolated) -> None:
    with pytest.raises(RewardError, match="'absent'") as raised:
        await isolated("absent").load()
    assert raised.value.kind == "KeyError"


def test_no_worker_outlives_a_process_that_forgets_to_close(tmp_path: Path) -> None:
    (tmp_path / "scored.py").write_text(CODE)
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from qwen35_trainer.rewards.isolated import IsolatedFunction\n"
        "async def main():\n"
        "    function = IsolatedFunction('scored:load', ('double',), 5.0)\n"
        "    await function.load()\n"
        "    print(*function.process_ids)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE)
    while psutil.pid_exists(int(ended.stdout)):  # it ends when its socket closes, and is not a child of this process
        time.sleep(0.01)


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


async def test_a_hanging_call_delays_only_itself(isolated, tmp_path: Path, grows_soon: None) -> None:
    function = isolated("appears", processes=2)
    hanging = asyncio.ensure_future(function.call(str(tmp_path / "absent")))
    assert await asyncio.gather(*(function.call(str(tmp_path)) for _ in range(5))) == [1.0] * 5
    assert not hanging.done()
    (tmp_path / "absent").touch()
    assert await hanging == 1.0


async def test_calls_beyond_the_maximum_of_processes_wait(isolated, tmp_path: Path, grows_soon: None) -> None:
    function = isolated("appears", processes=2)
    calls = [asyncio.ensure_future(function.call(str(tmp_path / "file"))) for _ in range(5)]
    await until(lambda: len(function.process_ids) == 2)
    await asyncio.sleep(0.1)
    assert len(function.process_ids) == 2
    (tmp_path / "file").touch()
    assert await asyncio.gather(*calls) == [1.0] * 5


@pytest.mark.quiet
async def test_the_time_in_which_a_call_waits_for_others_is_not_part_of_its_own(isolated) -> None:
    function = isolated("slowly", seconds=1.0)
    assert await asyncio.gather(*(function.call(0.6) for _ in range(3))) == [1.0] * 3


@pytest.mark.quiet
async def test_a_call_that_is_killed_does_not_touch_one_in_another_process(
    isolated, tmp_path: Path, grows_soon: None
) -> None:
    function = isolated("appears", seconds=2.0, processes=2)
    late = asyncio.ensure_future(function.call(str(tmp_path / "absent")))
    await asyncio.sleep(1.0)
    other = asyncio.ensure_future(function.call(str(tmp_path / "file")))
    with pytest.raises(RewardTimeoutError):
        await late
    assert not other.done()
    (tmp_path / "file").touch()
    assert await other == 1.0


async def test_added_processes_that_are_idle_end_except_for_one(
    isolated, tmp_path: Path, grows_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_module, "IDLE_SECONDS", 0.1)
    function = isolated("appears", processes=3)
    calls = [asyncio.ensure_future(function.call(str(tmp_path / "file"))) for _ in range(3)]
    await until(lambda: len(function.process_ids) == 3)
    workers = [psutil.Process(each) for each in function.process_ids]
    (tmp_path / "file").touch()
    await asyncio.gather(*calls)
    await until(lambda: len(function.process_ids) == 1)
    await until(lambda: sum(not has_ended(worker) for worker in workers) == 1)
    assert await function.call(str(tmp_path)) == 1.0


async def test_a_cancelled_call_leaves_no_busy_process_for_the_next_one(isolated, tmp_path: Path) -> None:
    function = isolated("appears")
    await function.load()
    call = asyncio.ensure_future(function.call(str(tmp_path / "absent")))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await function.call(str(tmp_path)) == 1.0


async def test_calls_of_a_coroutine_whose_process_dies_are_repeated_once(isolated, tmp_path: Path) -> None:
    function = isolated("first_dies")
    path = str(tmp_path / "died")
    assert await asyncio.gather(*(function.call(path, dies) for dies in (False, True, False))) == [1.0] * 3
    with pytest.raises(RewardError, match="the process of the function died, and another one that repeated the call"):
        await isolated("dies").call()


def test_slow_calls_make_room_for_others_and_double_the_processes_while_all_are_slow() -> None:
    assert [most_processes(cores, 0) for cores in (1, 8)] == [1, 8]
    running = itertools.accumulate(range(3), lambda running, _: most_processes(1, slow=running), initial=1)
    assert list(running) == [1, 3, 7, 15]
