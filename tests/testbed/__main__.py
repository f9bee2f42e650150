"""The test bed by hand, from the repository's root: `python -m tests.testbed up`, a control plane to play with until Ctrl-C."""

import signal
import sys
import tempfile
import time
from pathlib import Path

import typer

from tests.testbed import binaries
from tests.testbed.control_plane import ControlPlane, control_plane

app = typer.Typer(help="A Kubernetes control plane with KubeRay on this machine.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Keeps the command's name in the command line."""


@app.command()
def up() -> None:
    """Build what is not there yet, start everything, and end it on Ctrl-C or SIGTERM."""
    try:
        built = binaries.build()
    except binaries.NotBuilt as problem:
        sys.exit(str(problem))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="qwen35-testbed-", ignore_cleanup_errors=True) as folder,
        control_plane(built, Path(folder)) as plane,
    ):
        print(_welcome(plane, time.monotonic() - began), flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("ending")


def _welcome(plane: ControlPlane, seconds: float) -> str:
    return f"""ready after {seconds:.1f} s; logs in {plane.folder}; pods in {plane.pods.network}

export KUBECONFIG={plane.kubeconfig}
export PATH={plane.binaries.folder / "bin"}:$PATH
kubectl get nodes
kubectl apply -f examples/tiny-grpo.yaml
kubectl get qwen35trainings,rayjobs,rayclusters,pods --all-namespaces
helm list

Ctrl-C ends it."""


if __name__ == "__main__":
    app()
