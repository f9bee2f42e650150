"""Nothing of a cluster stays on the machine, however it ended."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.cluster import record, requirements
from tests.cluster.cgroups import ROOT
from tests.cluster.node import REPOSITORY
from tests.cluster.record import MARK, NotRemoved, Record
from tests.testbed import binaries

pytestmark = pytest.mark.timeout(1800)
NAME = "killed"
ONE = f"""
import signal
from tests.cluster.cluster import cluster
from tests.testbed import binaries
with cluster(binaries.find(), "{NAME}"):
    print("ready", flush=True)
    signal.pause()
"""
DEAF = f"""
import signal
from tests.cluster.record import recorded
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with recorded("{NAME}"):
    print("ready", flush=True)
    signal.pause()
"""


@pytest.fixture(autouse=True)
def possible() -> None:
    if why := requirements.missing():
        pytest.skip(why)


def test_the_next_start_removes_what_a_killed_one_left(eventually: Callable[..., None]):
    with holder(ONE) as (process, cluster_record):
        assert traces(cluster_record) == {"processes", "cgroup", "folder", "record"}
        devices = set(psutil.net_if_addrs())
        process.kill()
        process.wait()
    eventually(lambda: "processes" not in traces(cluster_record), "processes end with who started them")
    assert traces(cluster_record) >= {"folder", "record"}
    assert record.remove_leftovers() == [NAME]
    assert not traces(cluster_record)
    eventually(lambda: len(devices - set(psutil.net_if_addrs())) == 1, "the kernel removes its device")


@pytest.mark.soak
def test_containers_whose_keepers_were_killed_too_are_ended():
    with holder(ONE) as (process, cluster_record):
        for pid in [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]:
            # Supervisors first: nobody is left to end what they started. What ends with its parent may be gone by then.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    record.remove_leftovers()
    assert not traces(cluster_record)


@pytest.mark.soak
def test_up_leaves_a_cluster_and_down_leaves_nothing():
    if record.find("up"):
        pytest.skip("somebody plays with a cluster: `python -m tests.cluster down` ends it")
    before = mounts()
    up = [sys.executable, "-m", "tests.cluster", "up"]
    try:
        completed = subprocess.run(up, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        assert completed.stdout.startswith("ready after"), completed.stderr
        cluster_record = record.find("up")
        assert cluster_record
        kubectl = [binaries.find()["kubectl"], f"--kubeconfig={cluster_record.folder}/admin.kubeconfig", "get", "nodes"]
        assert "Ready" in subprocess.run(kubectl, capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run([sys.executable, "-m", "tests.cluster", "down"], cwd=REPOSITORY, check=True)
    assert not traces(cluster_record)
    assert mounts() == before


def test_what_could_not_be_removed_is_reported_and_stays_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def busy(folder: str, *, onexc: Callable[..., object]) -> None:
        onexc(os.rmdir, folder, OSError(f"{folder} is busy"))

    monkeypatch.setattr(record, "FOLDER", tmp_path / "records")
    with (
        monkeypatch.context() as stuck,
        pytest.raises(NotRemoved, match="is busy"),
        record.recorded(NAME) as cluster_record,
    ):
        stuck.setattr(shutil, "rmtree", busy)
    assert traces(cluster_record) == {"folder", "record"}
    assert record.remove_leftovers() == [NAME]
    assert not traces(cluster_record)


def test_who_does_not_end_a_cluster_is_named():
    with holder(DEAF) as (process, cluster_record), pytest.raises(NotRemoved, match=rf"\({process.pid}\)"):
        record.end(NAME, seconds=0.5)
    assert record.remove_leftovers() == [NAME]
    assert not traces(cluster_record)


@contextmanager
def holder(script: str) -> Iterator[tuple[subprocess.Popen[str], Record]]:
    """A process that has a cluster of this name, until it is killed: at the end at the latest. And the cluster's record."""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            cluster_record = record.find(NAME)
            assert cluster_record
            yield process, cluster_record
        finally:
            process.kill()


def traces(of: Record) -> set[str]:
    """What is left of it."""
    mark = f"{MARK}={of.name}".encode()
    there = {
        "processes": any(mark in environment(process) for process in Path("/proc").glob("[0-9]*")),
        "cgroup": any(ROOT.glob(f"*/{of.cgroup}")) or (ROOT / of.cgroup).exists(),
        "folder": Path(of.folder).exists(),
        "record": of.file.exists(),
        "mounts": any(of.folder in line for line in mounts()),
    }
    return {name for name, leftovers in there.items() if leftovers}


def environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def mounts() -> list[str]:
    """Of clusters: others may mount what they like meanwhile."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "qwen35" in line]
