"""The environment variables of a run, which all of its processes inherit.

They are set before the process has threads that read them: glibc's setenv may free the list of variables while getenv reads it in
another thread, which crashes with a segmentation fault. The tokenizers library calls getenv for each text.

Ray and torch would set variables later. Ray sets some in `ray.init`, while another thread reads the data. Torch sets
one when a worker first imports torch's compiler, and the worker has threads by then. This module therefore sets these
variables too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_trainer.rollout.vllm_environment import VARIABLES

if TYPE_CHECKING:
    from qwen35_trainer.manifest import TrainingSpec


def set_environment(*, in_cluster: bool) -> None:
    """Set the variables that do not depend on the manifest. Call it before importing Ray, which reads RAY_AUTH_MODE then.

    Workers inherit the variables. Ray could pass them in a runtime environment instead, but it starts a new process for each worker
    that has one. In a cluster the workers' image sets them (images/).
    """
    # Ray would handle SIGTERM in C++, in addition to Python: it prints a trace, and SIGALRM aborts the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    defaults = VARIABLES | {
        "RAY_USAGE_STATS_ENABLED": "0",  # a training sends no usage statistics
        "RAY_CLIENT_MODE": "0",  # Ray sets it to this when it is imported, while another thread reads the data
        "PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace",  # Ray sets it to this in any case
        # torch sets it to a folder of this kind in any case (torch/_inductor/runtime/cache_dir_utils.py)
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"),
    }
    if not in_cluster:
        # With Ray's default of 15, workers would yield to every other process on a shared machine.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so
        defaults |= {"RAY_AUTH_MODE": "token"}  # Ray's default for a local Ray
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def share_cores(spec: TrainingSpec) -> None:
    """Divide the cores of this machine among the workers of a run."""
    from qwen35_trainer.runtime.prepare import threads, workers_at_a_time

    os.environ["OMP_NUM_THREADS"] = str(threads(spec))
    if workers_at_a_time(spec) > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins while it waits takes another's core
