"""Ranks in processes of their own, all on this machine."""

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """`python -m MODULE RANK ARGUMENTS …` for every rank, side by side; each has to succeed."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), *map(str, arguments)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(error[-2000:] for error in errors)
