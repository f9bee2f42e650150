"""Formats a comparison as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qwen35_trainer.comparison.comparison import Comparison
from qwen35_trainer.comparison.row import ComparedRow


def comparison_table(comparison: Comparison) -> RenderableType:
    """Return the tables that `qwen35 compare` prints.

    "×0.5" in a cell means that the value is half of the first run's. Ratios that differ from
    1 by less than 0.5 % are not shown.
    """
    names = [run.name for run in comparison.runs]
    settings, figures = _table("settings that differ", names), _table("", names)
    _add(settings, comparison.settings)
    for section in comparison.sections:
        figures.add_row(Text(section.title), style="bold")
        _add(figures, section.rows)
        figures.add_section()
    return Group(
        settings if comparison.settings else Text("The runs have equal settings."),
        figures,
        *map(Text, comparison.notes),
    )


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(title, overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    return table


def _add(table: Table, rows: Iterable[ComparedRow]) -> None:
    for row in rows:
        table.add_row(Text(row.name), *map(Text, row.cells))
