"""Lets torch and vLLM take the processor for one with fewer instructions: a plugin of pytest, and a patch of other programs.

QWEN35_PROCESSOR=AVX2 pytest -p tests.rollout.older_processor tests/rollout/test_vllm.py

    value     instructions                          vLLM's kernels
    AVX2      AVX2 alone                            _C_AVX2
    AVX512    AVX-512 without that for bfloat16     _C_AVX512

Libraries choose their code when they are loaded, so a process has one value. At its end the plugin prints which kernels were loaded.
"""

import os
from pathlib import Path
from types import ModuleType

import pytest

PROCESSOR = "QWEN35_PROCESSOR"
"""The environment variable with the value."""
VARIABLES = {
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
}
"""Environment variables with which torch, oneDNN and MKL use no other instructions. A process must have them from its start."""
_MISSING = {
    "AVX2": ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    "AVX512": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
}


def environment_of(processor: str) -> dict[str, str]:
    """Return the variables of a process that has this processor."""
    return VARIABLES[processor] | {PROCESSOR: processor}


def remove_instructions(module: ModuleType) -> None:
    """Let `torch.cpu` say that the processor has only those of PROCESSOR. Without the variable nothing changes."""
    for name in _MISSING.get(os.environ.get(PROCESSOR, ""), ()):
        setattr(module, name, lambda: False)


def kernels(process: int) -> set[str]:
    """Return the names of vLLM's kernels that a process has loaded."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {Path(line.split()[-1]).name.partition(".")[0] for line in lines if "/vllm/_C" in line}


def pytest_configure() -> None:
    import torch  # a program that only imports this module may not need it

    remove_instructions(torch.cpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"kernels: {' '.join(sorted(kernels(os.getpid())))}")
