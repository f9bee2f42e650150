"""Builds the archive of an image (Open Container Initiative) from files of this machine, without a registry.

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


def write(image: str, out: IO[bytes], *, present: Collection[Layer] = ()) -> str:
    """Write the archive of the image in this folder of images/, and return the image's name with its tag.

    present: layers that the reader already has. Raises FileNotFoundError for an unknown image, and NotBuildable.
    """
    image_definition = definition(image)
    config = {
        "User": f"{image_definition.user}:{image_definition.user}",
        "WorkingDir": HOME,
        "Entrypoint": ["qwen35"],
        "Env": [
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            *(f"{name}={value}" for name, value in image_definition.environment.items()),
        ],
        "Labels": image_definition.labels,
    }
    write_archive(out, image_definition.tagged, layers(image_definition), config, present=present)
    return image_definition.tagged


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
