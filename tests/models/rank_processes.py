"""Ranks in processes of their own, all on this machine."""

import contextlib
import os
import tempfile

from tests.forks.start import REPOSITORY, start
from tests.patience import PATIENCE


def run_ranks(module: str, ranks: int, *arguments: object) -> None:
    """`python -m MODULE RANK ARGUMENTS …` for every rank, side by side; each has to succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as files:
        errors = [files.enter_context(tempfile.TemporaryFile()) for _ in range(ranks)]
        processes = [
            start(
                ["-m", module, str(rank), *map(str, arguments)],
                cwd=REPOSITORY,
                env=environment,
                stderr=errors[rank],
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(PATIENCE) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
            error_texts = [os.pread(error.fileno(), 1 << 20, 0).decode() for error in errors]
        assert codes == [0] * ranks, "\n".join(text[-2000:] for text in error_texts)
