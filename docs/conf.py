"""Settings of the documentation's site, which `make docs` builds with Sphinx.

Sphinx checks links, anchors and the navigation, and its search runs in the browser. The theme loads no fonts or scripts
from other hosts, so the site also works from a folder without a network.
"""

import re
from typing import Final

from sphinx.application import Sphinx

project = "qwen35"
html_show_copyright: Final = False
extensions = ["myst_parser"]
exclude_patterns: Final = ["conf.py"]
html_theme = "furo"
html_title = "qwen35"
html_show_sphinx = False
html_copy_source = False
# Names of headings as GitHub makes them, so that one link works in both places.
myst_heading_anchors = 4
highlight_language = "none"
# Examples are shortened with "…", which no lexer knows.
suppress_warnings: Final = ["misc.highlighting_failure"]

SECTION: Final = re.compile(r"^## (?P<title>.+)\n(?P<body>(?:(?!^## ).*\n)*)", re.MULTILINE)
PAGE: Final = re.compile(r"\]\((?P<page>[\w/.-]+)\.md\)")


def add_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """Turn each section of index.md into a part of the navigation: its title, and the pages that it links to."""
    if name != "index":
        return
    for section in SECTION.finditer(source[0]):
        pages = "\n".join(PAGE.findall(section["body"]))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section['title']}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
