"""Trains a tiny model in the pods of a new cluster: `make demo-cluster`, as root on Linux.

    build ─► node, KubeRay ─► helm install ─► kubectl apply ─► qwen35 status --watch ─► qwen35 report ─► remove all

The commands between start and end are those for any cluster. Only the Python packages of `make setup` are needed.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from images.system import NotBuildable
from tests.cluster import record, requirements
from tests.cluster.cluster import Cluster, cluster
from tests.cluster.containerd import NotImported
from tests.testbed import binaries
from tests.testbed.processes import NotReady

REPOSITORY = Path(__file__).parents[1]
COMMAND_TIMEOUT_SECONDS = 1800


def main() -> int:
    if why := requirements.missing():
        sys.stderr.write(f"{why}. `make demo` does not need it.\n")
        return 2
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    began = time.monotonic()
    report = REPOSITORY / "runs" / time.strftime("demo-cluster-%Y%m%d-%H%M%S") / "report.html"
    report.parent.mkdir(parents=True)
    try:
        _say("building what is not built yet: Kubernetes, KubeRay, two images")
        built = binaries.build()
        with cluster(built, "demo", ("operator", "trainer-cpu")) as running:
            _say(f"a cluster of one node, {time.monotonic() - began:.0f} s after the start")
            _train(running, report)
    except (
        *(binaries.NotBuilt, NotBuildable, NotImported, NotReady, record.Taken),
        *(subprocess.CalledProcessError, subprocess.TimeoutExpired),
    ) as problem:
        sys.stderr.write(f"{problem}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    _say(f"all removed; {time.monotonic() - began:.0f} s in all. The report: {report}")
    return 0


def _train(running: Cluster, report: Path) -> None:
    tools = running.binaries.folder / "bin"
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"KUBECONFIG": str(running.kubeconfig), "PATH": path}
    for command in (
        "helm install qwen35 helm/qwen35-operator -n qwen35-system --create-namespace --wait",
        "kubectl apply -f examples/tiny-grpo.yaml",
        "qwen35 status tiny-grpo --watch",
        "kubectl get qwen35trainings,rayjobs,pods",
        f"qwen35 report tiny-grpo --output {report}",
        "kubectl delete -f examples/tiny-grpo.yaml",
    ):
        _say(f"$ {command}")
        subprocess.run(command.split(), cwd=REPOSITORY, env=environment, check=True, timeout=COMMAND_TIMEOUT_SECONDS)  # noqa: S603


def _say(text: str) -> None:
    sys.stdout.write(f"\n{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
