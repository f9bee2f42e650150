"""The environment variables of a process that generates with vLLM.

vLLM adds some fifteen more itself while its engine is built, among them LD_PRELOAD and NUMEXPR_MAX_THREADS. Their values depend on the
machine, so they are not set in advance. The worker's own threads start later, but those of Ray run already
(`runtime/process.py` describes the danger).
"""

from __future__ import annotations

import os

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the worker's process (vllm_core.py)
    "VLLM_NO_USAGE_STATS": "1",  # a training sends no usage statistics
    "VLLM_CONFIGURE_LOGGING": "0",  # its log lines go to the worker's log file
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the workers of a machine share its cores
}
"""vLLM reads these when it is imported and when its engine is built."""


def set_variables() -> None:
    """Set the variables that are not set. A local run inherits them from `qwen35 run`, so that this adds none to a worker."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
