"""The tables for those who come from another trainer have every key once, and the clearest field for it."""

import pytest

from qwen35_trainer.manifest import TrainingSpec
from tools.migration import BEGIN, END, table, verl_fields, with_table


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("actor_rollout_ref.rollout.n", ["algorithm.groupSize"]),
        ("trainer.save_freq", ["checkpoint.everyUpdates"]),
        ("trainer.logger", ["tracking"]),
        ("data.train_files", ["data.train"]),
        ("data.val_files", ["data.validation"]),
        ("actor_rollout_ref.actor.optim.betas", ["train.optimizer.beta1", "train.optimizer.beta2"]),
    ],
)
def test_a_key_of_verl_has_the_single_field_or_else_the_section(key, fields):
    assert verl_fields(TrainingSpec)[key] == fields


def test_sections_of_verl_are_not_keys():
    keys = verl_fields(TrainingSpec)
    assert [key for key in keys if any(other.startswith(f"{key}.") for other in keys)] == []


def test_a_note_about_a_key_that_no_field_names_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.gone"):
        table("verl", {"trainer.nnodes": "`train.nodes`"}, {"trainer.gone": "a note"})


def test_the_text_around_the_table_is_kept():
    page = f"before\n{BEGIN}old\n{END}\nafter\n"
    assert with_table(page, "new") == f"before\n{BEGIN}\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="lacks the marks"):
        with_table("before\nafter\n", "new")
