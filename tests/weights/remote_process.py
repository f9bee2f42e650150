"""A process with an agent of NIXL: `python -m tests.weights.remote_process` lets others read its memory, and reads theirs until it is killed.

stdin: a pickled RemoteMemory. stdout: the pickled RemoteMemory of this process, whose bytes are all ONE, then a byte for each read.
"""

import os
import pickle
import sys
import time

import numpy as np

from qwen35_trainer.weights.transfer_agent import Span
from qwen35_trainer.weights.transports.nixl_agent import NixlAgent

BYTES = 16 * 2**20
ONE = 1


def main() -> None:
    """Run until this process is killed."""
    agent = NixlAgent()
    source = pickle.load(sys.stdin.buffer)
    own, read = np.full(BYTES, ONE, np.uint8), np.zeros(BYTES, np.uint8)
    out = sys.stdout.buffer
    pickle.dump(agent.register(own), out)
    out.flush()
    agent.register(read)
    while True:
        pending = agent.start_read(source, read, [Span(0, 0, BYTES)])
        while not pending.is_done():
            time.sleep(0.001)
        os.write(sys.stdout.fileno(), b".")


if __name__ == "__main__":
    main()
