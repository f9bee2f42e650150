"""Generates the Dockerfile of an image, for builders that can pull the base from a registry.

python -m images.dockerfile            writes all of them
python -m images.dockerfile --check    fails when one is not current
"""

import json
import sys

from images.definition import BASE, HOME, REPOSITORY, Definition, definition, names

INSTALL = "pip install --no-cache-dir --no-deps --disable-pip-version-check"


def render(image: Definition) -> str:
    """Return the content of the Dockerfile. Its context is the repository's root."""
    lines = ["# syntax=docker/dockerfile:1", "# From image.yaml by `make generate`.", f"FROM {BASE}"]
    if image.packages:
        packages = " ".join(image.packages)
        lines += [
            f"RUN apt-get update && apt-get install --yes --no-install-recommends {packages} \\",
            "    && rm -rf /var/lib/apt/lists/*",
        ]
    lines += [
        f"RUN groupadd --gid {image.user} qwen35 \\",
        f"    && useradd --uid {image.user} --gid {image.user} --create-home --home-dir {HOME} qwen35",
        *(f"ENV {name}={json.dumps(value)}" for name, value in image.environment.items()),
        *(f"LABEL {name}={json.dumps(value)}" for name, value in image.labels.items()),
        f"RUN --mount=type=bind,source={image.requirements},target=/tmp/requirements.txt \\",
        f"    {INSTALL} --require-hashes --requirement /tmp/requirements.txt",
        "RUN --mount=type=bind,target=/tmp/source,rw \\",
        f"    {INSTALL} /tmp/source",
        *(f"COPY {here} {there}" for here, there in image.files.items()),
        f"USER {image.user}:{image.user}",
        f"WORKDIR {HOME}",
        'ENTRYPOINT ["qwen35"]',
    ]
    return "\n".join(lines) + "\n"


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
