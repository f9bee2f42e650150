"""A cluster by hand, from the repository's root, as root on Linux:

python -m tests.cluster up      starts one to play with, and leaves it
python -m tests.cluster down    removes all of it

python -m tests.cluster prepare builds ahead, once, what a start takes from caches: both images
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import typer

from images.system import NotBuildable
from tests.cluster import node, record, requirements, store
from tests.cluster.cluster import cluster
from tests.cluster.containerd import Containerd, NotImported
from tests.testbed import binaries
from tests.testbed.processes import NotReady, Processes

NAME = "up"
app = typer.Typer(help="A Kubernetes cluster of one real node on this machine.", no_args_is_help=True)


@app.command()
def up() -> None:
    """Start a cluster and leave it running."""
    if why := requirements.missing():
        sys.exit(why)
    try:
        binaries.build()
    except binaries.NotBuilt as problem:
        sys.exit(str(problem))
    began = time.monotonic()
    with tempfile.NamedTemporaryFile(prefix="qwen35-cluster-", suffix=".log") as log:
        holder = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster", "hold"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not ((holder_record := record.find(NAME)) and holder_record.ready and holder_record.pid == holder.pid):
            if holder.poll() is not None:
                sys.exit(Path(log.name).read_text())
            time.sleep(0.1)
    print(_welcome(Path(holder_record.folder), time.monotonic() - began))


@app.command()
def down() -> None:
    """End the cluster of `up`, and remove what killed ones left."""
    try:
        ended = [NAME] if record.end(NAME) else []
        removed = ended + record.remove_leftovers()
    except record.NotRemoved as problem:
        sys.exit(str(problem))
    print(f"removed: {', '.join(removed) or 'nothing was there'}")


@app.command()
def prepare() -> None:
    """Build the images, and what containerd keeps of them. Does nothing when they are current, waits while another builds."""
    if why := requirements.missing():
        print(f"no images: {why}")
        return
    try:
        if not store.ready(requirements.IMAGES):
            _make_store()
    except (record.Taken, NotReady, NotBuildable, NotImported) as problem:
        sys.exit(str(problem))


def _make_store() -> None:
    record.remove_leftovers()
    # One record for each: who comes second waits for the lock of the images.
    with record.recorded(f"prepare-{os.getpid()}") as own_record:
        processes = Processes(Path(own_record.folder), own_record.environment)
        try:
            store.prepare(
                Containerd(Path(own_record.folder) / "containerd", processes, node.make_namespaces(processes)),
                requirements.IMAGES,
            )
        finally:
            processes.stop_all()


@app.command(hidden=True)
def hold() -> None:
    """Run the cluster of `up` until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with cluster(binaries.find(), NAME, requirements.IMAGES) as running:
            replace(running.record, ready=True).write()
            signal.pause()
    except (record.Taken, NotReady, NotBuildable, NotImported) as problem:
        sys.exit(str(problem))
    except KeyboardInterrupt:
        return  # the SIGTERM of above, and all is removed


def _welcome(folder: Path, seconds: float) -> str:
    return f"""ready after {seconds:.1f} s; logs in {folder}

export KUBECONFIG={folder / "admin.kubeconfig"}
export PATH={binaries.find().folder / "bin"}:$PATH
kubectl get nodes,pods --all-namespaces
helm install qwen35 helm/qwen35-operator --namespace qwen35-system --create-namespace --wait
kubectl apply --filename examples/tiny-grpo.yaml

python -m tests.cluster down    removes all of it"""


if __name__ == "__main__":
    os.umask(0o022)
    app()
