"""Generates the Dockerfile of an image, for builders that can pull the base from a registry.

python -m images.dockerfile            writes all of them
python -m images.dockerfile --check    fails when one is not current
"""

import json
import shlex
import sys
from collections.abc import Iterator

from images.bases import pinned
from images.definition import HOME, Definition, definition, names
from images.repository import REPOSITORY

INSTALL = "pip install --no-cache-dir --no-deps --disable-pip-version-check"
BUILD_LOCK = "requirements/build.txt"
"""The lock of what source distributions and this repository are built with."""
BUILDERS = "/opt/build"
"""The folder of these packages. The stage `build` has it, and it is mounted for installations, so that it is in no layer."""
WITH_BUILDERS = f"PYTHONPATH={BUILDERS}"
MOUNT_BUILDERS = f"--mount=type=bind,from=build,source={BUILDERS},target={BUILDERS}"


def render(image: Definition) -> str:
    """Return the content of the Dockerfile. Its context is the repository's root."""
    lines = [
        "# syntax=docker/dockerfile:1",
        "# From image.yaml by `make generate`.",
        *_base(image),
        *_packages(image),
        f"RUN groupadd --gid {image.user} qwen35 \\",
        f"    && useradd --uid {image.user} --gid {image.user} --create-home --home-dir {HOME} qwen35",
        *(f"ENV {name}={json.dumps(value)}" for name, value in image.environment.items()),
        *(f"LABEL {name}={json.dumps(value)}" for name, value in image.labels.items()),
        *_requirements(image),
        *_built(image),
        *(f"RUN {command}" for command in image.commands),
        f"RUN {MOUNT_BUILDERS} \\",
        "    --mount=type=bind,target=/tmp/source,rw \\",
        f"    {WITH_BUILDERS} {INSTALL} --no-build-isolation /tmp/source",
        *(f"COPY {here} {there}" for here, there in image.files.items()),
        f"USER {image.user}:{image.user}",
        f"WORKDIR {HOME}",
        f"ENTRYPOINT {json.dumps(image.entrypoint)}",
    ]
    return "\n".join(lines) + "\n"


def _base(image: Definition) -> Iterator[str]:
    """Yield the stage `build` and FROM, with an argument for the base where the image has arguments."""
    base = pinned(image.base)
    if image.build_arguments:
        yield f"ARG BASE={base}"
        base = "${BASE}"
    yield f"FROM {base} AS build"
    yield f"RUN --mount=type=bind,source={BUILD_LOCK},target=/tmp/requirements.txt \\"
    yield f"    {INSTALL} --target {BUILDERS} --require-hashes --requirement /tmp/requirements.txt"
    yield f"FROM {base}"
    for name, value in image.build_arguments.items():
        yield f"ARG {name}={value}"
        yield f"ENV {name}=${{{name}}}"


def _packages(image: Definition) -> Iterator[str]:
    if image.packages:
        packages = " ".join(image.packages)
        yield f"RUN apt-get update && apt-get install --yes --no-install-recommends {packages} \\"
        yield "    && rm -rf /var/lib/apt/lists/*"


def _requirements(image: Definition) -> Iterator[str]:
    """Yield the installation of the lock. With several architectures, the builder's variable TARGETARCH chooses it."""
    if len(image.architectures) == 1:
        (source,), lock = image.locks.values(), "/tmp/requirements.txt"
        yield f"RUN {MOUNT_BUILDERS} \\"
        yield f"    --mount=type=bind,source={source},target={lock} \\"
    else:
        lock = "/tmp/" + image.requirements.format(architecture="${TARGETARCH}")
        yield "ARG TARGETARCH"
        yield f"RUN {MOUNT_BUILDERS} \\"
        yield "    --mount=type=bind,source=requirements,target=/tmp/requirements \\"
    install = f"{WITH_BUILDERS} {INSTALL} --no-build-isolation --require-hashes --requirement {lock}"
    if not image.compilers:
        yield f"    {install}"
        return
    compilers = " ".join(image.compilers)
    yield f"    apt-get update && apt-get install --yes --no-install-recommends {compilers} \\"
    yield f"    && {install} \\"
    yield f"    && apt-get purge --yes --auto-remove {compilers} && rm -rf /var/lib/apt/lists/*"


def _built(image: Definition) -> Iterator[str]:
    """Yield the compilation of source distributions, with the packages installed so far."""
    if image.built:
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in image.build_environment.items())
        yield f"RUN --mount=type=bind,source={image.built},target=/tmp/requirements.txt \\"
        yield f"    {variables}{INSTALL} --no-build-isolation --no-binary :all: \\"
        yield "    --require-hashes --requirement /tmp/requirements.txt"


def main(*options: str) -> int:
    """Write or check all Dockerfiles. Returns the number of those that are not current."""
    stale = 0
    for name in names():
        file = REPOSITORY / "images" / name / "Dockerfile"
        content = render(definition(name))
        if "--check" not in options:
            file.write_text(content)
        elif not file.exists() or file.read_text() != content:
            print(f"{file.relative_to(REPOSITORY)} is not current: run make generate", file=sys.stderr)
            stale += 1
    return stale


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
