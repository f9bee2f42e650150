"""Compares a fork of the server with a new Python process: a program sees the same, and ends in the same way."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.forks import start as forks
from tests.forks.start import ForkServer, Process
from tests.patience import PATIENCE

WAITING = """
    import sys, time
    print("here", flush=True)
    time.sleep(1000)
"""
ENDS = {
    "at its end": ("pass", 0),
    "with a code": ("import sys; sys.exit(3)", 3),
    "with a text": ("import sys; sys.exit('no such file')", 1),
    "immediately": ("import os; os._exit(7)", 7),
    "by an exception": ("raise ValueError('wrong')", 1),
    "by Ctrl-C": ("import os; os.kill(os.getpid(), 2)\nimport time; time.sleep(1000)", -signal.SIGINT),
    "by SIGTERM": ("import os; os.kill(os.getpid(), 15)\nimport time; time.sleep(1000)", -signal.SIGTERM),
    "by SIGKILL": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "by an abort": ("import os; os.abort()", -signal.SIGABRT),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One that has imported nothing that takes time."""
    server = ForkServer([])
    yield server
    server.stop()


@pytest.fixture(params=["fork", "real"])
def started(request, server) -> Callable[..., Process]:
    """started([…], stdout=…): as a fork, and as a real process."""
    if request.param == "fork":
        return server.start
    return lambda arguments, **options: forks.start(arguments, forked=False, **options)


@pytest.fixture
def script(tmp_path) -> Callable[..., str]:
    """script("print(1)") is the path of a program."""

    def write(text: str, name: str = "program.py") -> str:
        file = tmp_path / name
        file.write_text(textwrap.dedent(text))
        return str(file)

    return write


@pytest.fixture
def worker(server, script, tmp_path) -> Iterator[Callable[[str], SimpleNamespace]]:
    """worker(text): the process that Ray would see of a worker with this program, the fork's pid, and what they write."""
    processes = []

    def begin(text: str) -> SimpleNamespace:
        program = script(f"import os\nprint(os.getpid(), flush=True)\n{textwrap.dedent(text)}", "default_worker.py")
        out = tmp_path / "out"
        with out.open("wb") as file:
            process = subprocess.Popen([server.python, program], stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        processes.append(process)
        return SimpleNamespace(process=process, lines=lambda: out.read_text().splitlines())

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("end", ENDS)
def test_it_ends_as_a_real_process_does(started, script, tmp_path, end):
    text, code = ENDS[end]
    with (tmp_path / "err").open("wb") as err:
        assert started([script(text)], stderr=err).wait(PATIENCE) == code
    error_text = (tmp_path / "err").read_text()
    assert ("wrong" in error_text, "no such file" in error_text) == (end == "by an exception", end == "with a text")


def test_it_waits_for_its_threads_and_runs_what_was_registered_for_the_end(started, script, tmp_path):
    program = script("""
        import atexit, threading, time
        atexit.register(print, "registered")
        threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
        print("main")
    """)
    with (tmp_path / "out").open("wb") as out:
        assert started([program], stdout=out).wait(PATIENCE) == 0
    assert (tmp_path / "out").read_text().split() == ["main", "thread", "registered"]


def test_a_program_sees_what_it_was_started_with(started, script, tmp_path):
    (tmp_path / "neighbour.py").write_text("")
    program = script("""
        import neighbour, json, os, signal, sys
        os.write(int(sys.argv[2]), b"to a pipe")
        seen = [sys.argv, __name__, os.getcwd(), sys.stdin.read(), sorted(os.environ), os.environ["QWEN35_TEST"]]
        seen += [os.getsid(0) == os.getpid() == os.getpgid(0), sorted(os.listdir("/proc/self/fd"))]
        seen += [signal.getsignal(signal.SIGINT) is signal.default_int_handler]
        print(json.dumps(seen))
        print("an error", file=sys.stderr)
    """)
    reading, writing = os.pipe()
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = started(
            [program, "an argument", str(writing)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=tmp_path,
            env={"QWEN35_TEST": "1", "LC_CTYPE": "C.UTF-8"},
            pass_fds=[writing],
            start_new_session=True,
        )
    os.close(writing)
    with process, os.fdopen(reading, "rb") as pipe:
        process.stdin.write(b"to stdin")
        process.stdin.close()
        assert pipe.read() == b"to a pipe"
    assert process.returncode == 0
    files = sorted({"0", "1", "2", str(writing), "3" if writing != 3 else "4"})  # and the folder that lists them
    assert json.loads((tmp_path / "out").read_text()) == [
        [program, "an argument", str(writing)],
        "__main__",
        str(tmp_path),
        "to stdin",
        ["LC_CTYPE", "QWEN35_TEST"],
        "1",
        True,
        files,
        True,
    ]
    assert (tmp_path / "err").read_text() == "an error\n"


def test_a_module_is_found_in_the_folder_and_on_the_path_of_its_process(started, tmp_path):
    for folder, name in (("here", "program"), ("there", "library")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text("import sys, library; sys.exit(5)" if name == "program" else "")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    assert started(["-m", "program"], cwd=tmp_path / "here", env=environment).wait(PATIENCE) == 5


def test_no_two_draw_the_same_random_numbers(started, script, tmp_path):
    program = script("import random, numpy; print(random.random(), numpy.random.random())")
    drawn = []
    for number in range(2):
        with (tmp_path / str(number)).open("wb") as out:
            assert started([program], stdout=out).wait(PATIENCE) == 0
        drawn += (tmp_path / str(number)).read_text().split()
    assert len(set(drawn)) == 4


def test_a_signal_for_its_group_reaches_what_it_started(started, script, tmp_path, eventually):
    program = script("""
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        child.wait()
    """)
    reading, writing = os.pipe()
    process = started([program], stdout=writing, start_new_session=True)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        child = int(pipe.readline())
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(PATIENCE) == -signal.SIGKILL
        assert pipe.read() == ""  # the last that could write, the child, is gone
    eventually(lambda: _ended(child), "end of the child, which closes its files a moment before")


def test_without_a_session_of_its_own_it_is_in_ours(started, script):
    program = script("import os, sys; sys.exit(os.getpgid(0) != int(sys.argv[1]))")
    assert started([program, str(os.getpgid(0))]).wait(PATIENCE) == 0


def test_who_has_ended_can_be_signalled_until_it_was_waited_for(started, script):
    process = started([script("pass")])
    while not _ended(process.pid):
        os.sched_yield()
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


def test_a_fork_ends_with_who_asked_for_it(server, script, eventually):
    fork = server.start([script("import time; time.sleep(1000)")])
    fork._connection.close()
    eventually(lambda: _ended(fork.pid), "end of the fork")


def test_a_wait_has_a_limit(started, script):
    process = started([script("import time; time.sleep(1000)")])
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(PATIENCE) == process.poll() == -signal.SIGKILL


def test_the_server_and_its_forks_end_with_the_tests_even_when_those_are_killed(script, tmp_path, eventually):
    program = script(WAITING)
    session = script(
        f"""
        import time
        from tests.forks.start import ForkServer
        server = ForkServer([])
        fork = server.start([{program!r}], start_new_session=True)  # the server kills a fork that nobody holds
        print(server.pid, fork.pid, server.socket, flush=True)
        time.sleep(1000)
        """,
        "session.py",
    )
    environment = os.environ | {"PYTHONPATH": str(forks.REPOSITORY)}
    with subprocess.Popen([sys.executable, session], stdout=subprocess.PIPE, env=environment) as process:
        try:
            *pids, socket = process.stdout.readline().split()
            pids = [int(pid) for pid in pids]
            assert len(pids) == 2
            assert not any(map(_ended, pids))
        finally:
            process.kill()  # an assertion that fails must not wait for the session's thousand seconds
    eventually(lambda: all(map(_ended, pids)), "end of the server and its fork")
    assert not Path(socket.decode()).parent.exists()


@pytest.mark.parametrize(("text", "code"), [("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
def test_what_stands_for_a_worker_of_ray_ends_as_the_worker(worker, text, code):
    begun = worker(text)
    assert begun.process.wait(PATIENCE) == code
    (pid,) = begun.lines()
    assert int(pid) != begun.process.pid


def test_a_worker_of_ray_gets_the_signals_for_what_stands_for_it(worker, eventually):
    begun = worker("""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
        print("here", flush=True)
        time.sleep(1000)
    """)
    eventually(lambda: "here" in begun.lines(), "start of the worker")
    begun.process.terminate()
    assert begun.process.wait(PATIENCE) == 9


def test_a_worker_of_ray_ends_when_what_stands_for_it_is_killed(worker, eventually):
    begun = worker(WAITING)
    eventually(lambda: "here" in begun.lines(), "start of the worker")
    begun.process.kill()
    eventually(lambda: _ended(int(begun.lines()[0])), "end of the worker")


def test_a_worker_of_ray_inherits_what_is_blocked(worker):
    """Ray blocks SIGINT for its processes: Ctrl-C in a terminal is for who started them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        begun = worker("import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert begun.process.wait(PATIENCE) == 0
    assert begun.lines()[1:] == [str(int(signal.SIGINT))]


def test_all_else_is_the_real_python(server):
    program = "import os, sys; print(sys.executable, os.getpid())"
    with subprocess.Popen([server.python, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.read().split() == [sys.executable, str(process.pid)]


def test_a_module_that_starts_a_thread_is_refused(tmp_path, monkeypatch, capfd):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1000], daemon=True).start()"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(AssertionError, match="did not start"):
        ForkServer(["threaded"])
    assert "2 threads" in capfd.readouterr().err
