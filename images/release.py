"""Releases all images: builds, scans, signs and tags them, and writes the chart's values with their digests.

    inputs pinned? ─► build with SBOM and provenance, push without a tag ─► scan ─► sign ─► verify ─► tag ─► values by digest
         │                                                                   │
         └─ refused, with everything to fill in                              └─ a finding of severity HIGH or CRITICAL ends the release

python -m images.release --plan                       prints the commands
python -m images.release --identity … --issuer …      runs them: keyless signatures, in a pipeline with an OIDC identity
python -m images.release --key KEY --public-key PUB   runs them: signatures with a key

A failed command ends the release. No image has a tag before it was scanned, signed and verified, so what has failed is
never pulled by its tag. Needs docker with buildx, trivy, cosign and helm, and a login to the registry.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
import yaml

from images import bases
from images.definition import Definition, definition, names
from images.repository import REPOSITORY
from qwen35_operator.operator_settings import IMAGES

SEVERITIES: Final = "HIGH,CRITICAL"
"""The severities that end a release. Findings without a fix do not count: nothing could be done about them."""
ACCEPTED: Final = "images/accepted-vulnerabilities.yaml"
CHART: Final = "helm/qwen35-operator"
PLACEHOLDER: Final = "sha256:" + "0" * 64
"""The digest in printed plans. The real one exists after the build."""
PIN: Final = re.compile(r"^[A-Za-z0-9][^\s;]*==\S+")


@dataclass(frozen=True)
class Signer:
    """The signer of a release: either a key and its public key, or an identity and the issuer of its token (keyless)."""

    identity: str = ""
    issuer: str = ""
    key: str = ""
    public_key: str = ""

    @property
    def sign_options(self) -> list[str]:
        return ["--key", self.key] if self.key else []

    @property
    def verify_options(self) -> list[str]:
        if self.key:
            return ["--key", self.public_key]
        return ["--certificate-identity", self.identity, "--certificate-oidc-issuer", self.issuer]


def problems(arguments: Sequence[str] = ()) -> list[str]:
    """Return what is not pinned, one sentence with the fix for each. arguments: NAME=VALUE of the build."""
    unpinned = [
        f"images/bases.yaml: the digest of {base} is not known. Run python -m images.bases, then make generate."
        for base, digest in bases.digests().items()
        if not digest
    ]
    for lock in lock_files():
        unpinned += [
            f"{lock}: {line} has no hash. Run make generate." for line in unhashed((REPOSITORY / lock).read_text())
        ]
    named = {argument.partition("=")[0] for argument in arguments if argument.partition("=")[2]}
    for image in map(definition, names()):
        for name, default in image.build_arguments.items():
            if not default and name not in named:
                unpinned.append(f"{image.name}: the build argument {name} has no value. Add --argument {name}=VALUE.")
    return unpinned


def lock_files() -> list[str]:
    """Return the paths of all locks that images are made of."""
    files = {"requirements/build.txt"}
    for image in map(definition, names()):
        files |= {*image.locks.values(), *([image.built] if image.built else [])}
    return sorted(files)


def unhashed(lock: str) -> list[str]:
    """Return the requirements in the text of a lock that are not pinned to one version, or have no hash."""
    lines = [line for line in lock.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    return [line.split()[0] for line in lines if not PIN.match(line) or "--hash=sha256:" not in line]


def build_command(image: Definition, revision: str, metadata: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that builds an image for all its architectures and pushes it by its digest, without a tag.

    metadata: the file into which buildx writes the digest.
    """
    command = ["docker", "buildx", "build", ".", "--file", f"images/{_folder(image)}/Dockerfile"]
    command += ["--platform", ",".join(f"linux/{architecture}" for architecture in image.architectures)]
    command += ["--sbom=true", "--provenance=mode=max", "--pull", "--metadata-file", str(metadata)]
    command += ["--label", f"org.opencontainers.image.revision={revision}"]
    for argument in arguments:
        if argument.partition("=")[0] in image.build_arguments:
            command += ["--build-arg", argument]
    return [*command, "--output", f"type=image,name={image.name},push-by-digest=true,name-canonical=true,push=true"]


def checked_commands(image: Definition, digest: str, signer: Signer) -> Iterator[list[str]]:
    """Yield the commands after the build: scan, sign, verify, and only then the tag."""
    pushed = f"{image.name}@{digest}"
    for architecture in image.architectures:
        scan = ["trivy", "image", "--severity", SEVERITIES, "--ignore-unfixed", "--exit-code", "1"]
        yield [*scan, "--ignorefile", ACCEPTED, "--platform", f"linux/{architecture}", pushed]
    yield from signed_commands(pushed, signer)
    yield ["docker", "buildx", "imagetools", "create", "--tag", image.tagged, pushed]


def signed_commands(pushed: str, signer: Signer) -> Iterator[list[str]]:
    """Yield the commands that sign what was pushed, and verify the signature. pushed: its name and digest."""
    yield ["cosign", "sign", "--yes", "--recursive", *signer.sign_options, pushed]
    yield ["cosign", "verify", *signer.verify_options, pushed]


def pushed_digest(answer: str) -> str:
    """Return the digest in the output of `helm push`. Raises ValueError without one."""
    if (digest := re.search(r"^Digest:\s*(sha256:[0-9a-f]{64})$", answer, re.MULTILINE)) is None:
        raise ValueError(f"helm push named no digest: {answer!r}")
    return digest[1]


def chart_commands(folder: Path, registry: str) -> Iterator[list[str]]:
    """Yield the commands that package and push the chart. folder: has the chart, and gets the package."""
    version = str(yaml.safe_load((REPOSITORY / CHART / "Chart.yaml").read_text())["version"])
    yield ["helm", "package", str(folder / Path(CHART).name), "--destination", str(folder)]
    yield ["helm", "push", str(folder / f"qwen35-operator-{version}.tgz"), f"oci://{registry}"]


def copy_chart(folder: Path, digests: dict[str, str]) -> None:
    """Copy the chart into a folder, with defaults that name every image by its digest, so that its signature covers the images too.

    digests: of each image, by the name of its folder. Raises ValueError if values.yaml has no place for one of them.
    """
    copy = folder / Path(CHART).name
    shutil.copytree(REPOSITORY / CHART, copy)
    file, wanted = copy / "values.yaml", values(digests)
    text, pinned = file.read_text(), {"digest": digests["operator"], **trainer_images(digests)}
    for key, value in pinned.items():
        text = re.sub(rf'^(  {key}): ""$', rf'\1: "{value}"', text, flags=re.MULTILINE)
    file.write_text(text)
    stored = yaml.safe_load(text)
    if any(stored[name] != stored[name] | value for name, value in wanted.items()):
        raise ValueError(
            f"{CHART}/values.yaml has no empty image.digest, or no empty entry of trainerImages, to fill in"
        )


def values(digests: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the chart's values that name every image by its digest. digests: of each image, by the name of its folder."""
    return {"image": {"digest": digests["operator"]}, "trainerImages": trainer_images(digests)}


def trainer_images(digests: dict[str, str]) -> dict[str, str]:
    """Return the trainer image of each device profile by its digest. digests: as for `values`."""
    by_reference = {definition(name).tagged: f"{definition(name).name}@{digest}" for name, digest in digests.items()}
    return {profile: by_reference[image] for profile, image in IMAGES.items()}


def _folder(image: Definition) -> str:
    return image.name.rpartition("/")[2]


def _plan(revision: str, arguments: Sequence[str], signer: Signer, registry: str) -> Iterator[list[str]]:
    for image in map(definition, names()):
        yield build_command(image, revision, Path("metadata.json"), arguments)
        yield from checked_commands(image, PLACEHOLDER, signer)
    yield from chart_commands(Path("COPY"), registry)
    yield from signed_commands(f"{registry}/qwen35-operator@{PLACEHOLDER}", signer)


def _run(command: Sequence[str]) -> None:
    print(shlex.join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True, cwd=REPOSITORY)


def _release(image: Definition, revision: str, arguments: Sequence[str], signer: Signer) -> str:
    """Build, scan, sign and tag one image, and return its digest. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        metadata = Path(folder) / "metadata.json"
        _run(build_command(image, revision, metadata, arguments))
        digest = str(json.loads(metadata.read_text())["containerimage.digest"])
    for command in checked_commands(image, digest, signer):
        _run(command)
    return digest


def _release_chart(registry: str, signer: Signer, digests: dict[str, str]) -> None:
    """Package, push, sign and verify the chart. Raises CalledProcessError, and ValueError if helm names no digest."""
    with tempfile.TemporaryDirectory() as folder:
        copy_chart(Path(folder), digests)
        package, push = chart_commands(Path(folder), registry)
        _run(package)
        answer = subprocess.run(
            push, check=True, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for command in signed_commands(f"{registry}/qwen35-operator@{pushed_digest(answer.stdout)}", signer):
        _run(command)


def _revision() -> str:
    """Return the commit of the working tree. Exits if the tree differs from it: the label would name other files."""
    changed = subprocess.run(
        ["git", "status", "--porcelain"], check=True, capture_output=True, text=True, cwd=REPOSITORY
    )
    if changed.stdout:
        sys.exit(f"The working tree has changes; commit or remove them:\n{changed.stdout}")
    head = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True, cwd=REPOSITORY)
    return head.stdout.strip()


def main(
    identity: Annotated[
        str, typer.Option(help="Identity in the keyless certificate, such as the URL of the workflow.")
    ] = "",
    issuer: Annotated[str, typer.Option(help="Issuer of the identity's OIDC token.")] = "",
    key: Annotated[
        str, typer.Option(help="Private key of cosign, instead of an identity: a file or a KMS reference.")
    ] = "",
    public_key: Annotated[str, typer.Option(help="Its public key.")] = "",
    argument: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Build argument.")] = None,
    registry: Annotated[str, typer.Option(help="Where the chart is pushed.")] = "ghcr.io/qwen35/charts",
    output: Annotated[Path, typer.Option(help="The chart's values by digest.")] = Path("values-by-digest.yaml"),
    plan: Annotated[bool, typer.Option(help="Print the commands and what is not pinned, and run nothing.")] = False,
) -> None:
    """Release all images and the chart."""
    arguments, signer = argument or [], Signer(identity, issuer, key, public_key)
    open_points = problems(arguments)
    if plan:
        signer = signer if key or identity else Signer("IDENTITY", "ISSUER")
        for command in _plan("REVISION", arguments, signer, registry):
            print(shlex.join(command))
        for point in open_points:
            print(f"# not pinned: {point}")
        return
    if not (identity and issuer) and not (key and public_key):
        sys.exit("Nobody signs: give --identity and --issuer, or --key and --public-key.")
    if open_points:
        sys.exit("Not everything is pinned:\n" + "\n".join(open_points))
    revision = _revision()
    digests = {name: _release(definition(name), revision, arguments, signer) for name in names()}
    output.write_text(yaml.safe_dump(values(digests), sort_keys=False))
    _release_chart(registry, signer, digests)


if __name__ == "__main__":
    typer.run(main)
