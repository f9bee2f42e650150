"""The HTML page of a comparison: one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Final

from qwen35_trainer.comparison.comparison import Comparison
from qwen35_trainer.comparison.comparison_charts import colour, comparison_charts
from qwen35_trainer.comparison.row import ComparedRow
from qwen35_trainer.page import figure_card, render_page, write_page

_BODY: Final = Path(__file__).with_suffix(".html")
_STYLE: Final = Path(__file__).with_suffix(".css")


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write an HTML page with the tables and charts of a comparison to `path`.

    The file is replaced atomically. Raises OSError if it cannot be written, and ImportError if plotly is not installed.
    """
    charts = comparison_charts(comparison.runs)
    names = [run.name for run in comparison.runs]
    title = " · ".join(names)
    body = Template(_BODY.read_text(encoding="utf-8")).substitute(
        runs="".join(
            f'<li style="--key:var(--{colour(place)[1:]})">{escape(name)}</li>' for place, name in enumerate(names)
        ),
        notes="".join(f'<p class="note">{escape(note)}</p>' for note in comparison.notes),
        settings=_table(names, [("Settings that differ", comparison.settings)])
        if comparison.settings
        else '<p class="note">The runs have equal settings.</p>',
        charts="".join(figure_card(chart.name, chart.title, chart.note, size=chart.size) for chart in charts),
        figures=_table(names, [(section.title, section.rows) for section in comparison.sections]),
    )
    figures = {chart.name: chart.figure for chart in charts}
    style = _STYLE.read_text(encoding="utf-8")
    write_page(path, render_page(f"{title} · qwen35", style=style, body=body, figures=figures))


def _table(names: Sequence[str], sections: Sequence[tuple[str, Sequence[ComparedRow]]]) -> str:
    """Return an HTML table with a column for each run. sections: title and rows of each section."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(
        f"<tr><th><h2>{escape(title)}</h2></th>{heads}</tr>{''.join(map(_line, rows))}" for title, rows in sections
    )
    return f"<section><table>{lines}</table></section>"


def _line(row: ComparedRow) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    return f"<tr><th>{escape(row.name)}</th>{cells}</tr>"
