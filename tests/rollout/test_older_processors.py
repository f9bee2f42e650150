"""vLLM on processors with AVX2 alone, and with AVX-512 but without its instructions for bfloat16."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .older_processor import environment_of

AS_THE_TRAINER = "forward_pass or any_prefix or three_versions or unchanged_policy or probe_takes or replaces_all"
"""Tests of test_vllm.py: log-probs, continuations, versions, truncated sampling, probes and loading."""


@pytest.mark.soak
@pytest.mark.parametrize("processor", ["AVX2", "AVX512"])
def test_vllm_computes_as_the_trainer_does_with_fewer_instructions(processor: str) -> None:
    """A whole run with AVX2 alone: tests/runtime/test_learning.py."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.rollout.older_processor", "-p", "no:cacheprovider"]
    environment = os.environ | environment_of(processor)
    for name in ("QWEN35_TESTS", "QWEN35_TESTS_ORDER"):
        environment.pop(name, None)
    done = subprocess.run(
        [*command, "tests/rollout/test_vllm.py", "-k", AS_THE_TRAINER],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"kernels: _C_{processor}\n" in done.stdout
