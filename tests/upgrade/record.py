"""Records what this version leaves in a cluster and on its storage, for the versions that must continue from it.

    a real node ─► two trainings in pods ─┬─► one that has ended  ─┬─► objects.json     children, pods, ConfigMaps, status
                                          └─► one that trains on  ─┴─► claim/           journals, metrics, checkpoints, exports
    this version's function ─► spec_hashes.json              hashes by which it starts attempts
    this version ─► definition.yaml, *.tgz, *.whl            what it installs: the CRD, the chart, the Python packages

    python -m tests.upgrade.record 0.1.0     as root on Linux, about 7 minutes; writes tests/upgrade/recordings/0.1.0/

The training that trains on is in its second attempt, because its head pod was killed.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from qwen35_operator.api import crd
from qwen35_operator.kube.kinds import TRAINING, WATCHED
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.node import REPOSITORY
from tests.cluster.patient_judge import PACE
from tests.cluster.release import CHART, ENFORCE, Release
from tests.cluster.training import PodTraining
from tests.testbed import binaries
from tests.upgrade import spec_hashes
from tests.upgrade.recording import CLAIM_FOLDER, DEFINITION, OBJECTS, RECORDINGS, TIME

IMAGES = ("operator", "trainer-cpu")
SECONDS = 900.0
"""For one training to reach the state that is recorded: its pods share two cores with the cluster."""
LONG = 1000
"""Updates that the running training does not reach."""
EPOCH = 6
"""Updates of the finished one."""
SMALL_MODEL = {"hiddenSize": 32, "intermediateSize": 32, "layers": 4, "characters": "0123456789"}
UNREAD = shutil.ignore_patterns("report.html", "*.log", "*.partial", "__pycache__", "patient_judge.py", PACE.name)
"""Files that no later version reads. A `.partial` folder is a save that was under way while this copied."""


def main() -> None:
    """Write the recording of this name. Refuses to replace one."""
    name = sys.argv[1]
    folder = RECORDINGS / name
    if folder.exists():
        sys.exit(f"{folder} exists: a recording shows what a version did, and is never made again")
    binaries.build()
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / name
        with cluster(binaries.find(), "record", IMAGES) as running:
            Release(running).install()
            made.mkdir()
            _write_release(running.binaries, made)
            spec_hashes.write(made)
            _record_finished(running, made)
            _record_running(running, made)
        shutil.copytree(made, folder)
    print(f"recorded in {folder}")


def _write_release(programs: binaries.Binaries, folder: Path) -> None:
    """Write what this version installs. Building the packages needs a package registry."""
    (folder / DEFINITION).write_text(crd.text())
    subprocess.run([programs["helm"], "package", str(CHART), "--destination", str(folder)], check=True)
    with tempfile.TemporaryDirectory() as built:
        build = [sys.executable, "-m", "uv", "build", "--wheel", "--quiet", "--out-dir", built, str(REPOSITORY)]
        subprocess.run(build, check=True)
        [wheel] = Path(built).glob("*.whl")
        shutil.copy(wheel, folder)


def _record_finished(running: Cluster, folder: Path) -> None:
    """A training that succeeded, with its checkpoint and its model as a Hugging Face folder."""
    training = _begin(running, "finished", EPOCH, "AtEnd")
    _wait(training, lambda: training.state == "Succeeded", "Succeeded")
    _write(training, folder / "finished")
    training.delete_and_see_that_nothing_is_left()


def _record_running(running: Cluster, folder: Path) -> None:
    """A training in its second attempt, which has saved a checkpoint of its own."""
    training = _begin(running, "running", LONG, "None")
    _wait(training, lambda: "lastCheckpoint" in training.status, "a checkpoint")
    training.delete_pod("head")
    _wait(training, lambda: training.reported(2) > 0 and training.state == "Running", "the second attempt trains")
    resumed = training.status["lastCheckpoint"]["update"]
    _wait(training, lambda: training.status["lastCheckpoint"]["update"] > resumed, "a checkpoint of the second attempt")
    _write(training, folder / "running")


def _begin(running: Cluster, name: str, updates: int, export: str) -> PodTraining:
    """Start a training with a small model in a namespace of its own."""
    namespace = f"record-{name}"
    running.api.post("/api/v1/namespaces", {"metadata": {"name": namespace, "labels": {ENFORCE: "baseline"}}})
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    running.processes.wait("kube-controller-manager", lambda: running.api.exists(account))
    return PodTraining.begin(
        running,
        namespace,
        name,
        updates,
        model={"source": {"random": SMALL_MODEL}},
        failurePolicy={"maxRestarts": 3, "backoffSeconds": 0, "stallFactor": 1000.0},
        checkpoint={"everyUpdates": 3, "keep": 1, "export": export},
    )


def _wait(training: PodTraining, reached: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + SECONDS
    while not reached():
        if training.state == "Failed" or time.monotonic() > until:
            sys.exit(f"{training.name} did not reach: {what}. Its status: {json.dumps(training.status)}")
        time.sleep(0.5)


def _write(training: PodTraining, folder: Path) -> None:
    """The objects first: whatever they name lies on the claim by then."""
    folder.mkdir()
    kinds = {kind.name: kind for kind in (TRAINING, *WATCHED)}
    objects = {name: training.plane.api.get(kind.path(training.namespace))["items"] for name, kind in kinds.items()}
    text = json.dumps({TIME: time.time(), "objects": objects}, indent=1)
    (folder / OBJECTS).write_text(text + "\n")
    shutil.copytree(training.folder, folder / CLAIM_FOLDER, ignore=UNREAD)


if __name__ == "__main__":
    main()
