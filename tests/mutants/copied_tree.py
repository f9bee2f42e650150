"""A temporary copy of a checkout, in which one mistake at a time is made, and pytest runs.

The checkout itself is never written to. What git ignores is left out: caches and virtual environments.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from tests.mutants.mutant import Mutant

LIMIT = 7200.0
"""Seconds for one run of pytest. A test that hangs fails sooner, by its own time-out."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", re.MULTILINE)
NOT_FOUND = re.compile(r"^ERROR: (?:not found: \S*?(tests/.*)|file or directory not found: (.*))$", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """How a run of pytest ended."""

    code: int
    """pytest's exit code: 0 all passed, 1 some failed, 4 a named test does not exist, 5 no test was found."""
    failed: tuple[str, ...]
    """Node ids of tests that failed."""
    missing: tuple[str, ...]
    """Node ids that do not exist."""
    output: str
    core_seconds: float


class CopiedTree:
    """`folder` is the copy's root."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Python trusts cached bytecode by size and whole seconds of the source's time: each write gets a time of its own.
        self._times = count(int(time.time()) - 10_000_000)

    @contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """The mistake is in the copy meanwhile. Raises DoesNotApply."""
        path = self.folder / mutant.file
        before = path.read_text() if path.is_file() else ""
        self._write(path, mutant.applied_to(before))
        try:
            yield
        finally:
            self._write(path, before)

    def pytest(self, targets: Sequence[str], *, stop_at_first: bool = False) -> Ran:
        """Run tests of the copy, by node id or folder."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join(str(self.folder / part) for part in ("operator", "trainer", ".")),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short", "-rfE"]
        command += [*(["-x"] if stop_at_first else []), *targets]
        before = os.times()
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
            )
        except subprocess.TimeoutExpired as slow:
            printed = slow.stdout.decode(errors="replace") if isinstance(slow.stdout, bytes) else (slow.stdout or "")
            return Ran(-1, (), (), f"{printed}\nnot within {LIMIT:.0f} s", 0.0)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        output = done.stdout + done.stderr
        missing = tuple(first or other for first, other in NOT_FOUND.findall(output))
        return Ran(done.returncode, tuple(FAILED.findall(output)), missing, output, spent)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        now = next(self._times)
        os.utime(path, (now, now))


@contextmanager
def copy_of(checkout: Path) -> Iterator[CopiedTree]:
    """A copy of what git tracks in `checkout`, changes and new files included. It is removed at the end."""
    listed = subprocess.run(
        ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="qwen35-mutants-") as folder:
        for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
            source, target = checkout / name, Path(folder) / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        yield CopiedTree(Path(folder))
