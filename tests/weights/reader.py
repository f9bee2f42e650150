"""A replica as a process: `python -m tests.weights.reader` fetches every publication that comes through stdin, and holds all of them.

It prints the version of each when it holds it.
"""

import pickle
import sys

from tests.weights.ways import fetch, reader


def main() -> None:
    """Run until stdin ends."""
    arriving, held = reader(), []
    while True:
        try:
            published = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        held.append(fetch(arriving, published))
        print(held[-1].version, flush=True)


if __name__ == "__main__":
    main()
