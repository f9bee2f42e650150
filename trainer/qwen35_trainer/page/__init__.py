"""Builds HTML pages of charts: each is one file that needs no network and follows the reader's light or dark mode.

A figure is a plotly figure as plain data. A colour in it is a name such as "@bound", which the page replaces by
a value of the active style sheet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from qwen35_trainer.atomic_files import write_atomically

type Figure = dict[str, Any]
"""A plotly figure, or a part of one."""

_PAGE: Final = Path(__file__).with_name("page.html")


def render_page(title: str, *, style: str, body: str, figures: Mapping[str, Figure]) -> str:
    """Return the HTML of a whole page with plotly's script inside.

    title: plain text. style: CSS. body: HTML; each figure is drawn at the place of its `figure_card`. figures: name →
    figure. Raises ImportError if plotly is not installed.
    """
    from plotly.offline import get_plotlyjs  # a second to import

    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(title), style=style, body=body, figures=_script(figures), plotly=get_plotlyjs()
    )


def figure_card(name: str, title: str, note: str, *, size: str = "", key: str = "") -> str:
    """Return the HTML of a card with a title and a caption, in which the page draws the figure `name`.

    title, note: plain text of the title and of the caption. size: CSS class for the width of the card, such as "wide";
    empty for the usual width. key: HTML, such as a legend, that is appended to the caption.
    """
    return (
        f'<figure class="{size}"><figcaption><h2>{escape(title)}</h2><span>{escape(note)}</span>{key}</figcaption>'
        f'<div class="plot" id="plot-{name}"></div></figure>'
    )


def write_page(path: Path, text: str) -> None:
    """Write a page atomically: a reader sees the old file or the new one, never half of one.

    Several processes may write to the same path. Raises OSError if the page cannot be written.
    """
    write_atomically(path, text, suffix=str(os.getpid()))


def _script(value: object) -> str:
    """Encode a value as JSON for a script element. The character < is escaped, so that no text can end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
