"""Renders docs/reference/image-versions.md from the table of versions and the definitions of the images.

python -m images.versions_reference            writes the page
python -m images.versions_reference --check    fails when it is not current
"""

import sys
from collections.abc import Iterator
from typing import Final

from images.definition import MACHINES, Definition, definition
from images.locks import files
from images.repository import REPOSITORY
from images.versions import versions

PAGE: Final = REPOSITORY / "docs" / "reference" / "image-versions.md"
IMAGES: Final = ("trainer-cpu", "trainer-cuda", "trainer-ascend")
SOURCES: Final = {
    "wheel": "wheel",
    "distribution": "compiled in the image",
    "base": "base image",
    "vendor": "vendor's index, without a hash",
}
HEAD: Final = """\
# Versions in the images

<!-- From images/versions.yaml and the definitions of the images, by `make generate`. -->

The trainer images ([how to build them](../operations.md#images)) contain these versions.
Everything else in a lock follows from them.
"""


def render() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_components(), "", *_omitted(), "", *_definitions(), ""])


def _components() -> Iterator[str]:
    yield f"| component | {' | '.join(IMAGES)} | source | reason |"
    yield "|---|" + "---|" * (len(IMAGES) + 2)
    for component in versions().components:
        cells = [component.versions.get(image, "") for image in IMAGES]
        yield f"| `{component.name}` | {' | '.join(cells)} | {SOURCES[component.source]} | {component.reason} |"


def _omitted() -> Iterator[str]:
    yield "## What the images leave out"
    yield ""
    yield "| package | left out of | reason |"
    yield "|---|---|---|"
    for omission in versions().omitted:
        yield f"| `{omission.name}` | {', '.join(omission.images)} | {omission.reason} |"


def _definitions() -> Iterator[str]:
    yield "## Bases and locks"
    yield ""
    yield "| image | base | architectures | locks |"
    yield "|---|---|---|---|"
    for image in IMAGES:
        image_definition = definition(image)
        locks = ", ".join(f"`{path}`" for path in files(image_definition))
        yield f"| `{image}` | `{image_definition.base}` | {_architectures(image_definition)} | {locks} |"


def _architectures(image: Definition) -> str:
    return ", ".join(f"{architecture} ({MACHINES[architecture]})" for architecture in image.architectures)


def main(*options: str) -> int:
    """Write or check the page. Returns 1 if it is not current."""
    content = render()
    if "--check" not in options:
        PAGE.write_text(content)
    elif not PAGE.exists() or PAGE.read_text() != content:
        print(f"{PAGE.relative_to(REPOSITORY)} is not current: run make generate", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
