"""The environment variables and the memory allocator of a process that generates with vLLM.

vLLM adds some fifteen more itself while its engine is built, among them LD_PRELOAD and NUMEXPR_MAX_THREADS. Their values depend on the
machine, so they are not set in advance. The worker's own threads start later, but those of Ray run already
(`runtime/process.py` describes the danger).
"""

from __future__ import annotations

import ctypes
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


REUSED_BYTES, TRIM_BYTES = 32 * 2**20, 256 * 2**20
"""Freed tensors below the first size, which is the maximum of glibc, stay in the process, up to the second number of bytes."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the settings, from malloc.h."""


def reuse_freed_tensors() -> None:
    """Let this process keep the memory of small freed tensors, for the next step of the engine. Does nothing without glibc.

    Every worker of a run returns freed tensors of 1 MiB to the system (runtime/process.py), because a trainer's memory would
    fragment. A step of vLLM on the CPU allocates the same tensors again: with 64 sequences of a model of 20 million
    parameters, the system took a fifth of the time of a step to provide these pages.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_MMAP_THRESHOLD, REUSED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
