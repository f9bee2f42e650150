"""Pytest plugin of `make check`: only tests that start no process and, unless TORCH=1, import no torch.

Whole folders and files are left out here, single tests by the markers `processes` and `torch`. What is left over and starts a
process or imports torch all the same fails: otherwise a new import would make `make check` minutes slower, and nobody would notice.
"""

import os
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROCESSES = (
    *("cluster", "controlplane", "distributed", "forks", "gpu", "helm", "recipes", "rewards"),
    *("data/test_imports.py", "mutants/test_runner.py", "progress/test_html_report.py", "progress/sinks"),
    "comparison/test_comparison_page.py",
    *("simulate_cli/test_plot.py", "runtime/link/test_config_maps.py", "runtime/link/test_reporter.py"),
    *("runtime/test_faults.py", "runtime/test_folder.py", "runtime/test_imports.py", "runtime/test_in_cluster.py"),
    *("runtime/test_journal_file.py", "runtime/test_memory.py", "runtime/test_modes.py", "runtime/test_signals.py"),
    *("runtime/test_stop.py", "runtime/link/test_runs.py", "runtime/test_environment.py", "runtime/test_exporting.py"),
    *("runtime/test_output.py", "runtime/test_site.py", "suite/test_set_up.py", "suite/test_links.py"),
    *("runtime/test_losses.py", "runtime/test_every_call.py", "runtime/test_learning.py", "runtime/test_versions.py"),
    *("models/test_context_parallel.py", "models/test_vision_ranks.py"),
    *(
        "rollout/test_vllm.py",
        "rollout/test_split_replica.py",
        "weights/test_host_weights.py",
        "weights/test_segment.py",
    ),
)
"""Whose tests start processes."""
TORCH = (
    *("algorithms", "engines", "models", "rollout", "weights", "data/test_picture_reader.py", "data/test_tokenizer.py"),
    *("runtime/test_assembly.py", "runtime/test_engine_thread.py", "runtime/test_supervised.py"),
    "upgrade/test_recordings.py",
)
"""Whose tests import torch."""
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"})
"""Audit events of the standard library: sys.addaudithook."""
LOOK_UP = ("/ldconfig", "/gcc", "/ld")
"""Programs with which `ctypes.util.find_library` looks for a library, which the import of torch calls."""

with_torch = bool(os.environ.get("TORCH"))
left_out = {TESTS / name for name in (PROCESSES if with_torch else (*PROCESSES, *TORCH))}


class Refused(BaseException):
    """Not an Exception, so that no code under test handles it."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path in left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    markers = {"processes"} if with_torch else {"processes", "torch"}
    marked = {item for item in items if markers & {marker.name for marker in item.iter_markers()}}
    config.hook.pytest_deselected(items=[item for item in items if item in marked])
    items[:] = [item for item in items if item not in marked]


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in STARTS and not str(arguments[0]).endswith(LOOK_UP):
        raise Refused(f"this test starts a process ({event}): mark it `processes`, and `make check` leaves it out")
    if event == "import" and arguments[0] == "torch" and not with_torch:
        raise Refused("this test imports torch: mark it `torch`, and `make check` leaves it out")


sys.addaudithook(refuse)
