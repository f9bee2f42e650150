"""The environment variables of a run, which all of its processes inherit.

They are set before the process has threads that read them. A new variable moves the list of all of them, and a thread that reads
one meanwhile crashes with a segmentation fault: glibc's setenv frees the list that a getenv goes through, and tokenizers calls
getenv for each text. Ray adds variables of its own in `ray.init`, while another thread reads the data, and torch adds one when its
compiler is first imported, in a worker that has threads by then. So those are set here too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen35_trainer.spec import TrainingSpec


def set_environment(*, in_cluster: bool) -> None:
    """What does not depend on the manifest. Call it before Ray is imported, which reads RAY_AUTH_MODE then.

    Workers inherit the variables. Ray could pass them in a runtime environment instead, but it starts a new process for each worker
    that has one. In a cluster the workers' image sets them (images/).
    """
    # Ray would handle SIGTERM in C++, beside Python: it prints a trace and lets SIGALRM abort the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",  # a training tells nobody that it runs
        "RAY_CLIENT_MODE": "0",  # Ray sets it to this when it is imported, beside the thread that reads the data
        "PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace",  # Ray sets it to this in any case
        # torch sets it to a folder of this kind in any case (torch/_inductor/runtime/cache_dir_utils.py)
        "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"),
    }
    if not in_cluster:
        # Ray's 15 would let everything else on a shared machine go first.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray spells it so
        defaults |= {"RAY_AUTH_MODE": "token"}  # Ray's own default for a Ray of the run's own
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def share_cores(spec: TrainingSpec) -> None:
    """Divide this machine's cores among the workers of a run, which all compute on it."""
    from qwen35_trainer.runtime.prepare import threads, workers_at_a_time

    os.environ["OMP_NUM_THREADS"] = str(threads(spec))
    if workers_at_a_time(spec) > 1:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # a thread that spins while it waits takes another's core
