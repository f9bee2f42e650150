from pathlib import Path

import pytest

from qwen35_trainer.rewards.reward_settings import ProcessLimits, usable_cores


@pytest.mark.parametrize(
    ("cores", "scoring", "functions", "fast"),
    [(1, 1, 8, 1), (2, 1, 8, 1), (4, 1, 8, 2), (16, 2, 16, 4), (64, 8, 8, 4), (256, 8, 8, 8)],
)
def test_the_processes_of_a_machine(cores: int, scoring: int, functions: int, fast: int) -> None:
    limits = ProcessLimits.of(cores)
    assert (limits.scoring, limits.functions, limits.cores) == (scoring, functions, fast)


@pytest.mark.parametrize(
    ("limit", "cores"), [("100000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", None), ("", None)]
)
def test_a_pod_has_the_cores_of_its_limit(tmp_path: Path, limit: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert usable_cores(tmp_path / "cpu.max") == (cores or usable_cores(tmp_path / "absent"))
