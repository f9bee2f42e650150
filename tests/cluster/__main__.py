"""A cluster by hand, from the repository's root, as root on Linux:

python -m tests.cluster up      starts one to play with, and leaves it
python -m tests.cluster down    removes all of it
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
from tests.cluster import record, requirements
from tests.cluster.cluster import cluster
from tests.cluster.containerd import NotImported
from tests.testbed import binaries
from tests.testbed.processes import NotReady

NAME = "up"
IMAGES = ("operator", "trainer-cpu")
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
        while not ((found := record.find(NAME)) and found.ready and found.pid == holder.pid):
            if holder.poll() is not None:
                sys.exit(Path(log.name).read_text())
            time.sleep(0.1)
    print(_welcome(Path(found.folder), time.monotonic() - began))


@app.command()
def down() -> None:
    """End the cluster of `up`, and remove what killed ones left."""
    try:
        ended = [NAME] if record.end(NAME) else []
        removed = ended + record.remove_leftovers()
    except record.NotRemoved as problem:
        sys.exit(str(problem))
    print(f"removed: {', '.join(removed) or 'nothing was there'}")


@app.command(hidden=True)
def hold() -> None:
    """Run the cluster of `up` until SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with cluster(binaries.find(), NAME, IMAGES) as running:
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
