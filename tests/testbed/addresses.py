"""Addresses of fake pods that are addresses of this machine.

    python -IS addresses.py FILE

Takes one of eight networks that no other bed of this network namespace has, makes every address of it local, so that
a process that listens on 0.0.0.0:PORT answers for every pod, writes JSON `{"network": ..., "unreachable": reason or null}` to
FILE, and gives all back on SIGTERM. A process of its own because it has to clean up however the tests end.
"""

import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

# RFC 2544, benchmarks within one device: in nobody's routing table. Each part has room for 16,384 pods.
NETWORKS = list(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=18))


def hold(file: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    number, lock = take()
    network = NETWORKS[number]
    unreachable = _route("replace", network)
    aside = file.with_suffix(".writing")
    aside.write_text(json.dumps({"network": str(network), "unreachable": unreachable}))
    aside.rename(file)
    signal.sigwait([signal.SIGTERM])
    if unreachable is None and (failed := _route("del", network)):
        sys.exit(f"the route to {network} stays: {failed}")
    lock.close()


def take() -> tuple[int, socket.socket]:
    """Which of NETWORKS is the caller's for as long as it holds the lock.

    An abstract socket is a lock that belongs to the network namespace, as routes do, and ends with its process.
    """
    for number in range(len(NETWORKS)):
        lock = socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0qwen35-testbed-{number}")
        except OSError:
            lock.close()
        else:
            return number, lock
    sys.exit(f"all {len(NETWORKS)} pod networks are taken: end one of the test beds that run on this machine")


def _route(verb: str, network: ipaddress.IPv4Network) -> str | None:
    """Why it could not be done."""
    if os.geteuid() != 0:
        return "a local route to the pods needs root"
    # Not in every user's PATH.
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    if not ip:
        return "a local route to the pods needs `ip`: install iproute2"
    command = [ip, "route", verb, "local", str(network), "dev", "lo"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"`{' '.join(command)}` failed: {done.stderr.strip()}" if done.returncode else None


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
