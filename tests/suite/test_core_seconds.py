"""The figures that `make test` prints at its end."""

import itertools
import json
from pathlib import Path

from tests.core_seconds import Budget, Cost, budgets, by_folder, increase, load, recorded, table, used_by

TABLE = """
| folder | budget | recorded | what needs it |
|---|---|---|---|
| `tests/pipeline` | 25 | 1,020 | histories |
| `tests/cli` | 5 |  | none |
"""
COSTS = [
    Cost("tests/pipeline/test_buffer.py::test_a", 20.0, 21.0),
    Cost("tests/pipeline/deep/test_b.py::test_b[tests/x]", 10.0, 1.0),
    Cost("collection", 2.0, 2.0),
]


def test_costs_of_all_files_below_a_package_are_one_sum():
    assert by_folder(COSTS) == {"tests/pipeline": (2, 30.0), "collection": (0, 2.0)}


def test_budgets_and_recorded_figures_come_from_the_table_in_contributing():
    assert budgets(TABLE) == {"tests/pipeline": Budget(25, 1020), "tests/cli": Budget(5, None)}


def test_a_folder_over_its_budget_is_marked_and_others_are_not():
    lines = table(COSTS, budgets(TABLE), complete=True).splitlines()
    assert [line.split()[:5] for line in lines if line.startswith("tests/pipeline")] == [
        ["tests/pipeline", "2", "30.0", "1020", "25"]
    ]
    assert [line.split()[0] for line in lines if line.endswith("over its budget")] == ["tests/pipeline"]


def test_recording_changes_the_figures_of_the_folders_that_ran_and_nothing_else():
    assert recorded(TABLE, COSTS) == TABLE.replace("1,020", "30")


def test_control_groups_of_both_versions_are_read_in_seconds(tmp_path: Path):
    (tmp_path / "cpuacct.usage").write_text("2500000000\n")
    assert used_by(tmp_path) == 2.5
    (tmp_path / "cpuacct.usage").unlink()
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert used_by(tmp_path) == 1.5


def test_a_node_that_starts_again_adds_what_it_used_and_takes_nothing_away():
    readings = [0.0, 40.0, 42.5, 1.5, 2.0]
    assert [increase(before, now) for before, now in itertools.pairwise(readings)] == [40.0, 2.5, 1.5, 0.5]


def test_sessions_that_ran_side_by_side_are_one_list(tmp_path: Path):
    for number, complete in enumerate((True, False)):
        costs = [{"test": f"tests/cli/test_{number}.py::test", "core": 1.0, "wall": 2.0}]
        (tmp_path / f"{number}.json").write_text(json.dumps({"complete": complete, "costs": costs}))
    costs, complete = load(tmp_path)
    assert ([cost.test for cost in costs], complete) == (
        ["tests/cli/test_0.py::test", "tests/cli/test_1.py::test"],
        False,
    )


def test_the_table_of_contributing_has_a_row_for_each_package_of_tests():
    repository = Path(__file__).parents[2]
    packages = {f"tests/{place.name}" for place in (repository / "tests").iterdir() if any(place.rglob("test_*.py"))}
    assert packages <= set(budgets((repository / "CONTRIBUTING.md").read_text()))
