"""An image as an archive of the Open Container Initiative, without a registry, from what this machine has.

python -m images.build trainer-cpu --output trainer-cpu.tar    for `ctr images import`, `docker load`, `kind load image-archive`
"""

import sys
from collections.abc import Collection
from pathlib import Path
from typing import IO, Annotated

import typer

from images.archive import Layer, write_archive
from images.definition import HOME, definition
from images.layers import layers
from images.system import NotBuildable


def write(image: str, out: IO[bytes], *, known: Collection[Layer] = ()) -> str:
    """Writes the archive of the image in this folder of images/, and returns the image's name with its tag.

    known: layers that the reader has. Raises FileNotFoundError for a name that is none, and NotBuildable.
    """
    found = definition(image)
    config = {
        "User": f"{found.user}:{found.user}",
        "WorkingDir": HOME,
        "Entrypoint": ["qwen35"],
        "Env": [
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            *(f"{name}={value}" for name, value in found.environment.items()),
        ],
        "Labels": found.labels,
    }
    write_archive(out, found.tagged, layers(found), config, known=known)
    return found.tagged


def main(
    image: Annotated[str, typer.Argument(help="A folder of images/ with an image.yaml.")],
    output: Annotated[Path, typer.Option(help="The archive.")],
) -> None:
    """Write the archive of an image."""
    try:
        with output.open("wb") as out:
            print(write(image, out), file=sys.stderr)
    except (FileNotFoundError, NotBuildable) as problem:
        sys.exit(str(problem))


if __name__ == "__main__":
    typer.run(main)
