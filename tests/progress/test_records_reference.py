from dataclasses import fields
from pathlib import Path

import pytest

from qwen35_trainer.progress import records_reference
from qwen35_trainer.progress.records import CLASSES

REPOSITORY = Path(__file__).parents[2]


def test_the_reference_in_the_repository_is_current():
    current = (REPOSITORY / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert current == records_reference.text(), (
        "run: python -m qwen35_trainer.progress.records_reference > docs/reference/metrics.md"
    )


@pytest.mark.parametrize("name", CLASSES)
def test_every_key_of_a_record_has_a_row_with_a_meaning(name):
    section = records_reference.text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    assert [row[0].strip(" `") for row in rows] == [field.name for field in fields(CLASSES[name])]
    assert all(len(row) == 4 and len(row[2].split()) > 1 for row in rows)


def test_the_names_in_trackers_are_those_of_the_scalars():
    text = records_reference.text()
    assert (
        "| `reward_mean` | number or null | Mean reward of the samples of the update. | `train/reward_mean` |" in text
    )
    assert "| `evaluation/score_by_reward/<name>` |" in text
