"""Runs in place of an agent of the raylet (local_node.py), does nothing, and ends with the raylet."""

import os
import time

RAYLET = "RAY_RAYLET_PID"
"""Environment variable with the process id of the raylet, which the raylet gives to its agents."""
RAYLET_CHECK_SECONDS = 1.0
"""Interval, in seconds, at which the stand-in checks whether the raylet still runs."""


def main() -> None:
    """Sleep until the process that started this one has ended."""
    raylet = int(os.environ.get(RAYLET, os.getppid()))  # the raylet may have ended before this line
    while os.getppid() == raylet:
        time.sleep(RAYLET_CHECK_SECONDS)


if __name__ == "__main__":
    main()
