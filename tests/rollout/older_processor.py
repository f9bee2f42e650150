"""A plugin of pytest: torch and vLLM take the processor for one with fewer instructions.

QWEN35_PROCESSOR=AVX2 pytest -p tests.rollout.older_processor tests/rollout/test_vllm.py

    value     instructions                          vLLM's kernels
    AVX2      AVX2 alone                            _C_AVX2
    AVX512    AVX-512 without that for bfloat16     _C_AVX512

Libraries choose their code when they are loaded, so a process has one value. At its end the plugin prints which kernels were loaded.
"""

import os
from pathlib import Path

import pytest
import torch

_MISSING = {
    "AVX2": ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    "AVX512": ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
}
for _name in _MISSING[os.environ["QWEN35_PROCESSOR"]]:
    setattr(torch.cpu, _name, lambda: False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    kernels = {Path(line.split()[-1]).name.partition(".")[0] for line in lines if "/vllm/_C" in line}
    terminalreporter.write_line(f"kernels: {' '.join(sorted(kernels))}")
