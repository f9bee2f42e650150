"""Pages of charts: one HTML file that opens anywhere, with no network, light or dark.

A figure is plotly's, as plain values. A colour in it is a name such as "@bound"; the page puts in the value of the style sheet
in force.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

type Figure = Mapping[str, Any]

_PAGE: Final = Path(__file__).with_name("page.html")


def page(title: str, *, style: str, body: str, figures: Mapping[str, Figure]) -> str:
    """The whole document. `style` and `body` are the caller's; each figure is drawn where `body` has its `card`."""
    from plotly.offline import get_plotlyjs  # a second to import

    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=escape(title), style=style, body=body, figures=_script(figures), plotly=get_plotlyjs()
    )


def card(name: str, title: str, note: str, *, size: str = "", key: str = "") -> str:
    """Where figure `name` is drawn, under its title. `size` is a class of the caller's style, `key` more of the caption."""
    return (
        f'<figure class="{size}"><figcaption><h2>{escape(title)}</h2><span>{escape(note)}</span>{key}</figcaption>'
        f'<div class="plot" id="plot-{name}"></div></figure>'
    )


def write(path: Path, text: str) -> None:
    """Write a page, whole or not at all. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _script(value: object) -> str:
    """JSON that may stand in a script element: no text in it can close the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
