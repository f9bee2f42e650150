import gc
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen35_trainer.runtime.process import own_address, starting

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo.yaml"


class Knot:
    """Refers to itself, so that only a collection ends it."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def collecting() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_while_a_process_starts():
    with starting():
        knot = weakref.ref(Knot())
        held = [[] for _ in range(10 * gc.get_threshold()[0])]
        assert knot() is not None
    assert held
    assert gc.isenabled()


def test_what_is_there_by_then_is_never_looked_at_again_and_what_comes_after_is():
    before = gc.get_freeze_count()
    with starting():
        held = [[] for _ in range(5000)]
    assert held
    assert gc.get_freeze_count() >= before + 5000
    knot = weakref.ref(Knot())
    gc.collect()
    assert knot() is None


IPV4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))
IPV6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0))


@pytest.mark.parametrize(
    ("entries", "address"),
    [([IPV4], "10.0.0.1"), ([IPV6], "fd00::1"), ([IPV6, IPV4], "10.0.0.1")],
    ids=["IPv4", "IPv6", "dual stack"],
)
def test_a_pod_has_an_address_in_clusters_of_either_protocol_and_of_ipv4_in_those_of_both(
    monkeypatch, entries, address
):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "demo-1-train-a.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_arguments, **_options: entries)
    assert own_address() == address


def test_the_start_of_a_base_class_is_part_of_the_whole():
    with starting():
        with starting():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_start_that_fails_leaves_collection_on():
    with pytest.raises(ImportError), starting():
        raise ImportError("no such library")
    assert gc.isenabled()


@pytest.mark.processes
def test_an_actor_keeps_two_log_files_of_limited_size(tmp_path):
    """For months of messages, too: the newest are there."""
    code = """
import logging, pathlib
from qwen35_trainer.runtime import process
process.LOG_BYTES = 2000
process.Process("driver", pathlib.Path("logs"))
for number in range(1000):
    logging.getLogger("loop").info("update %d", number)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    older, newest = sorted((tmp_path / "logs").iterdir(), reverse=True)
    assert (newest.name, older.name) == ("driver.log", "driver.log.1")
    assert newest.read_text().endswith("update 999\n")
    assert all(0 < path.stat().st_size <= 2000 for path in (newest, older))


def resident_after(code: str) -> list[int]:
    """MiB that a fresh process has where `code` says `see()`."""
    start = """
import psutil
from qwen35_trainer.runtime.process import return_freed_tensors, trim
def see(): print(psutil.Process().memory_info().rss // 2**20)
def held(number, size): return [b"x" * size for _ in range(number)]
"""
    out = subprocess.run([sys.executable, "-c", start + code], check=True, capture_output=True, text=True).stdout
    return [int(line) for line in out.split()]


@pytest.mark.processes
def test_freed_tensors_are_the_systems_again_although_others_lie_above_them():
    code = """
large = b"x" * (30 << 20)
del large  # by now glibc would keep whatever is smaller
parts = held(50, 4 << 20)
see()
del parts[::2]
see()
"""
    before, kept = resident_after(code)
    assert before - kept < 10  # else there is nothing to mend
    before, after = resident_after("return_freed_tensors()" + code)
    assert before - after > 90


@pytest.mark.processes
def test_trim_returns_the_memory_between_small_objects():
    before, kept, after = resident_after("parts = held(10000, 10000)\nsee()\ndel parts[::2]\nsee()\ntrim()\nsee()")
    assert before - kept < 10
    assert kept - after > 10


@pytest.mark.processes
def test_the_driver_uses_the_pages_of_freed_arrays_again_and_other_workers_do_not(tmp_path):
    code = f"""
import resource
from pathlib import Path
from types import SimpleNamespace
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.runtime.driver import Driver
from qwen35_trainer.runtime.process import Process

logs = Path({str(tmp_path)!r})
job = SimpleNamespace(folder=SimpleNamespace(logs=logs), spec=load_manifest(Path({str(EXAMPLE)!r})).spec)
def new_pages():
    def fill(): b"x" * (8 << 20)
    fill()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10): fill()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
Process("rollout-0", logs)
print(new_pages())
Driver(job, [None])
print(new_pages())
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    worker, driver = (int(line) for line in out.split())
    assert driver < worker / 10
