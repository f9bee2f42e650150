"""The head's Triton kernels without a GPU: interpreted, they pass the head's own tests; and they compile for NVIDIA's chips."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qwen35_trainer.models.qwen3_5 import head, head_passes
from tests.patience import PATIENCE

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not made for this platform")
REPOSITORY = Path(__file__).parents[2]
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qwen35_trainer.models.qwen3_5 import head_kernels

TYPES = {"targets": "*i64", "vocabulary": "i32", "inverse_temperature": "fp32"}
CONSTANTS = {"WITH_ENTROPY": "constexpr", "BLOCK": "constexpr"}
for architecture in (80, 90, 100):
    for precision in ("bf16", "fp16", "fp32"):
        for kernel in (head_kernels._reduce, head_kernels._gradient):
            for with_entropy in (False, True):
                types = TYPES | CONSTANTS | {"logits": f"*{precision}"}
                source = ASTSource(
                    fn=kernel,
                    signature={name: types.get(name, "*fp32") for name in kernel.arg_names},
                    constexprs={"WITH_ENTROPY": with_entropy, "BLOCK": head_kernels.BLOCK},
                )
                target, options = GPUTarget("cuda", architecture, 32), {"num_warps": head_kernels.WARPS_PER_PROGRAM}
                made = triton.compile(source, target=target, options=options).asm
                print(architecture, precision, kernel.fn.__name__, with_entropy, len(made["cubin"]) > 0, ".local" in made["ptx"])
"""


@pytest.mark.processes
def test_interpreted_they_pass_the_tests_of_the_head():
    """But for those that count what operators give: the interpreter has operators of its own."""
    # In a process of its own: Triton decides at its import whether it interprets.
    done = _run(
        "-m", "pytest", "--quiet", "tests/models/test_head.py", "-k", "not held and not default", TRITON_INTERPRET="1"
    )
    assert "20 passed, 7 deselected" in done


@pytest.mark.processes
def test_they_compile_and_need_no_more_registers_than_there_are(tmp_path):
    rows = [line.split() for line in _run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()]
    assert len(rows) == 3 * 3 * 2 * 2
    assert {(has_code, spills) for *_, has_code, spills in rows} == {("True", "False")}


def test_without_a_gpu_the_passes_are_those_of_torch():
    assert head._passes(torch.zeros(1)) is head_passes


def _run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command,
        env=os.environ | environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
