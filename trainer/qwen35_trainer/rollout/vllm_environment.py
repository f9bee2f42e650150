"""The environment variables and the memory allocator of a process that generates with vLLM.

vLLM itself sets about fifteen more variables while its engine is built, among them LD_PRELOAD and NUMEXPR_MAX_THREADS. Their
values depend on the machine, so they cannot be set in advance. Setting variables while other threads run is dangerous
(`runtime/process.py`). When vLLM sets its variables, Ray's threads are already running; the worker's other threads start later.
"""

from __future__ import annotations

import ctypes
import os

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in the worker's process (vllm_core.py)
    "VLLM_NO_USAGE_STATS": "1",  # a training sends no usage statistics
    "VLLM_CONFIGURE_LOGGING": "0",  # its log lines go to the worker's log file
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the workers of a machine share its cores
    "VLLM_ASCEND_ENABLE_NZ": "0",  # vllm-ascend keeps the plain layout of weights; it refuses to replace others
}
"""Environment variables that vLLM reads when it is imported and when its engine is built."""


def set_variables() -> None:
    """Set the variables of `VARIABLES` that are not set yet.

    In a local run a worker inherits all of them from `qwen35 run`, so nothing is left to set.
    """
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


REUSED_BYTES, TRIM_BYTES = 32 * 2**20, 256 * 2**20
"""Two limits of glibc's allocator, in bytes. Freed memory of tensors and arrays below the first size is kept for reuse.

The first is the maximum that glibc allows. The second is the maximum size of all memory that is kept.
"""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of the settings of glibc's `mallopt`, from malloc.h."""


def reuse_freed_tensors() -> None:
    """Let this process keep the memory of small freed tensors and arrays for the next ones. Does nothing without glibc.

    Every worker of a run returns freed tensors of 1 MiB or more to the system (runtime/process.py), because a trainer's
    memory would fragment otherwise. Two kinds of processes allocate the same sizes again and again, and would spend
    much time on getting the same pages from the system. The first is a process with vLLM on the CPU: with 64 sequences
    of a model of 20 million parameters, getting the pages took a fifth of the time of a step. The second is the driver,
    which allocates the reports of replicas, the tokens of sequences, and batches: for responses of 32,000 tokens,
    getting the pages took more than half of the driver's own working time.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
