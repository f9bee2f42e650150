"""Runs in place of an agent of the raylet (local_node.py), does nothing, and ends with the raylet."""

import os
import time

RAYLET = "RAY_RAYLET_PID"
"""Environment variable with the process id of the raylet, which the raylet gives to its agents."""
RAYLET_CHECK_SECONDS = 1.0
"""Interval, in seconds, at which the stand-in checks whether the raylet still runs."""


def main() -> None:
    """Sleep until the raylet has ended.

    Its process id comes from the variable, because it may have ended before this line, and then the parent is another one.
    """
    raylet = int(os.environ[RAYLET])
    while os.getppid() == raylet:
        time.sleep(RAYLET_CHECK_SECONDS)


if __name__ == "__main__":
    main()
