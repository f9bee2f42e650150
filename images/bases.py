"""The digests of base images, images/bases.yaml.

python -m images.bases     requests all digests from the registries and writes them; needs docker with buildx and a network

The same tag has another digest after each update of Debian, so run it before a release, then `make generate`, and read
the difference.
"""

import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

import yaml

from images.repository import REPOSITORY

FILE: Final = REPOSITORY / "images" / "bases.yaml"
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


def digests() -> dict[str, str]:
    """Return the digest of each base by its name and tag; an empty one is not known. Raises ValueError for any other text."""
    table: dict[str, str] = yaml.safe_load(FILE.read_text())
    for base, digest in table.items():
        if digest and not DIGEST.fullmatch(digest):
            raise ValueError(f"images/bases.yaml: {base}: {digest} is not a digest, sha256: and 64 hexadecimal digits.")
    return table


def pinned(base: str) -> str:
    """Return a base with its digest if it is known. Raises KeyError if the table lacks the base."""
    digest = digests()[base]
    return f"{base}@{digest}" if digest else base


def inspect_command(base: str) -> list[str]:
    """Return the command that prints the present digest of a base."""
    return ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", base]


def write(new_digests: Mapping[str, str]) -> None:
    """Replace the digests in the table, and keep its comments. Raises ValueError for a text that is not a digest."""
    text = FILE.read_text()
    for base, digest in new_digests.items():
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"The registry answered {digest!r} for {base}, which is not a digest.")
        text = re.sub(rf'^{re.escape(base)}: ".*"$', f'{base}: "{digest}"', text, flags=re.MULTILINE)
    FILE.write_text(text)


def main() -> int:
    """Request all digests and write them."""
    new_digests = {}
    for base in digests():
        answer = subprocess.run(inspect_command(base), check=True, capture_output=True, text=True)
        new_digests[base] = answer.stdout.strip()
    write(new_digests)
    print("run make generate: the Dockerfiles name the digests", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
