"""The programs of the control plane, built once from the pinned Go modules in `go/` and kept in a cache.

    ${XDG_CACHE_HOME:-~/.cache}/qwen35/testbed/<hash>/
        bin/       etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm kuberay-operator kwok
                   kubelet kube-proxy coredns pause, for a real node (tests.cluster)
        kuberay/   role.yaml, crd/*.yaml and install.yaml, as released with the operator
    …/testbed/<hash of the oldest KubeRay>/
        bin/kuberay-operator and kuberay/, of the oldest version that the docs name; only with QWEN35_TESTBED_KUBERAY=oldest

The hash covers the modules and the build flags: a change of either starts a new build, and a finished build does not need Go.
`python -m tests.testbed.binaries` builds; it needs Go and the standard library, so that it can run while the other requirements are installed.

kwok is a module of its own because it does not compile against the Kubernetes libraries of the others; CoreDNS is one
because it is a program of ours, with the few plugins that a cluster needs. The oldest KubeRay is one because a Go module
can require only one version of a package.
"""

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODULES = Path(__file__).parent / "go"
MIN_GO_VERSION = (1, 25)
KUBERNETES = "v1.35.4"
KUBERAY = "github.com/ray-project/kuberay/ray-operator"
type Modules = dict[str, dict[str, str]]
"""Package of each program, by module. Go names a program after its package's last element."""
PACKAGES: Modules = {
    "control_plane": {
        "etcd": "go.etcd.io/etcd/server/v3",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
        "helm": "helm.sh/helm/v3/cmd/helm",
        "kuberay-operator": KUBERAY,
    },
    "kwok": {"kwok": "sigs.k8s.io/kwok/cmd/kwok"},
    "node": {"coredns": "./coredns", "pause": "./pause"},
}
MIN_KUBERAY_MODULES: Modules = {"kuberay_oldest": {"kuberay-operator": KUBERAY}}
ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-trimpath -buildvcs=false", "GOTOOLCHAIN": "local", "GOWORK": "off"}
# Without a version that parses, kubectl and Helm refuse to talk to the API server.
VERSION = {
    "gitVersion": KUBERNETES,
    "gitMajor": "1",
    "gitMinor": "35",
    "gitCommit": "unknown",
    "gitTreeState": "archive",
    "buildDate": "1970-01-01T00:00:00Z",
}
LINK = {
    "control_plane": " ".join(
        ["-s -w"]
        + [
            f"-X {package}.{name}={value}"
            for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
            for name, value in VERSION.items()
        ]
    ),
    "kwok": "-s -w",
    "node": "-s -w",
}


class NotBuilt(Exception):
    """The programs are not there, and why they cannot be had."""


@dataclass(frozen=True)
class Binaries:
    """A finished build."""

    folder: Path
    oldest_kuberay: Path | None = None
    """The build whose KubeRay is used; None for that of `folder`."""

    def __getitem__(self, name: str) -> str:
        """Path of a program."""
        return str((self._with_kuberay if name == "kuberay-operator" else self.folder) / "bin" / name)

    @property
    def kuberay_definitions(self) -> list[Path]:
        return sorted((self._with_kuberay / "kuberay" / "crd").glob("*.yaml"))

    @property
    def kuberay_role(self) -> Path:
        return self._with_kuberay / "kuberay" / "role.yaml"

    @property
    def kuberay_installation(self) -> Path:
        """All that a cluster needs for KubeRay to run in it, definitions included, in the namespace `default`."""
        return self._with_kuberay / "kuberay" / "install.yaml"

    @property
    def _with_kuberay(self) -> Path:
        return self.oldest_kuberay or self.folder


def find() -> Binaries:
    """The build of these modules and flags. Raises NotBuilt when there is none."""
    folder = _find(PACKAGES)
    return Binaries(folder, _find(MIN_KUBERAY_MODULES)) if _wants_oldest_kuberay() else Binaries(folder)


def build() -> Binaries:
    """Builds what is not there yet: about 0.8 GB, eight minutes on two cores. Raises NotBuilt."""
    folder = _build(PACKAGES, "control_plane")
    if not _wants_oldest_kuberay():
        return Binaries(folder)
    return Binaries(folder, _build(MIN_KUBERAY_MODULES, "kuberay_oldest", kubectl=folder / "bin" / "kubectl"))


def _wants_oldest_kuberay() -> bool:
    wanted = os.environ.get("QWEN35_TESTBED_KUBERAY", "")
    if wanted not in ("", "oldest"):
        raise NotBuilt(f"QWEN35_TESTBED_KUBERAY is {wanted!r}: unset it, or say oldest")
    return bool(wanted)


def _find(modules: Modules) -> Path:
    folder = _cache() / _key(modules)
    if not folder.is_dir():
        raise NotBuilt(f"no test bed in {folder}: run `make testbed` (it needs Go, and some minutes the first time)")
    return folder


def _build(modules: Modules, with_kuberay: str, kubectl: Path | None = None) -> Path:
    """The folder of these programs, with the manifests of the module `with_kuberay`. `kubectl`: of another build."""
    folder = _cache() / _key(modules)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            go = _go()
            aside = folder.with_suffix(".building")
            # What a build that was cut off left behind.
            shutil.rmtree(aside, ignore_errors=True)
            for module, packages in modules.items():
                _compile(go, module, packages, aside / "bin")
            _copy_kuberay(go, with_kuberay, kubectl or aside / "bin" / "kubectl", aside)
            aside.rename(folder)
    return folder


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "qwen35" / "testbed"


def _key(modules: Modules) -> str:
    files = sorted(file for module in modules for file in (MODULES / module).rglob("*") if file.is_file())
    inputs = [file.read_bytes() for file in files]
    inputs.append(repr((modules, ENVIRONMENT, LINK, platform.machine())).encode())
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build of the test bed")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _go() -> str:
    wanted = ".".join(map(str, MIN_GO_VERSION))
    go = shutil.which("go")
    if not go:
        raise NotBuilt(f"building the test bed needs Go {wanted} or newer, and there is no `go` in PATH: install it")
    text = subprocess.run([go, "version"], env=_environment(), check=True, capture_output=True, text=True).stdout
    match = re.search(r"go(\d+)\.(\d+)", text)
    if not match or tuple(map(int, match.groups())) < MIN_GO_VERSION:
        raise NotBuilt(f"building the test bed needs Go {wanted} or newer, but {go} is {text.strip()}: update it")
    return go


def _environment() -> dict[str, str]:
    return os.environ | ENVIRONMENT


def _compile(go: str, module: str, packages: dict[str, str], folder: Path) -> None:
    """Every program of a module in one call, so that what they share is compiled once."""
    _say(f"building {', '.join(packages)}")
    folder.mkdir(parents=True, exist_ok=True)
    # -v names each package once it is compiled.
    command = [go, "build", "-v", "-ldflags", LINK.get(module, "-s -w"), "-o", f"{folder}/", *packages.values()]
    began = last_message = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=MODULES / module, env=_environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        for line in process.stderr:
            lines.append(line)
            if (now := time.monotonic()) - last_message > 15:
                last_message = now
                _say(f"  {now - began:4.0f} s, {len(lines)} packages compiled")
    if process.returncode:
        raise NotBuilt(f"`{' '.join(command[:2])}` in {MODULES / module} failed:\n{''.join(lines[-30:])}")
    for name, package in packages.items():
        built = re.sub(r"/v\d+$", "", package).rpartition("/")[2]
        (folder / built).rename(folder / name)
    _say(f"  {time.monotonic() - began:4.0f} s, done")


def _copy_kuberay(go: str, module: str, kubectl: Path, folder: Path) -> None:
    """The operator's manifests are in its module, next to its code."""
    command = [go, "list", "-m", "-f", "{{.Dir}}", KUBERAY]
    listed = subprocess.run(
        command, cwd=MODULES / module, env=_environment(), check=True, capture_output=True, text=True
    )
    config = Path(listed.stdout.strip()) / "config"
    own = folder / "kuberay"
    (own / "crd").mkdir(parents=True)
    # The module cache is read-only, and copies of its files should not be.
    for definition in (config / "crd" / "bases").glob("*.yaml"):
        shutil.copyfile(definition, own / "crd" / definition.name)
    shutil.copyfile(config / "rbac" / "role.yaml", own / "role.yaml")
    with (own / "install.yaml").open("wb") as file:
        subprocess.run([kubectl, "kustomize", config / "default"], check=True, stdout=file)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(build().folder)
    except NotBuilt as problem:
        sys.exit(str(problem))
