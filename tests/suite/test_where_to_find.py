"""The table "Where to find what" in docs/architecture.md: a search, a file, and at most one reference from there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = (REPOSITORY / "trainer/qwen35_trainer", REPOSITORY / "operator/qwen35_operator")
TEXTS = {path: path.read_text(encoding="utf-8") for package in PACKAGES for path in package.rglob("*.py")}
ROW = re.compile(
    r"^\| (?P<question>.+?\??) \| `(?P<term>.+?)` \| `(?P<opens>\S+\.py)` \| (?:`(?P<then>\S+\.py)`: )?`(?P<symbol>\S+)` \|$",
    re.MULTILINE,
)
APPENDIX = (REPOSITORY / "docs/architecture.md").read_text(encoding="utf-8").split("## Where to find what")[1]
ROWS = {row["question"]: row for row in ROW.finditer(APPENDIX)}
MAX_FILES_FOUND = 20


def _file(name: str) -> Path:
    (path,) = [package / name for package in PACKAGES if package / name in TEXTS]
    return path


def test_the_table_has_every_row():
    assert len(ROWS) == APPENDIX.count("\n| ") - 1  # less the heading
    assert len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_search_leads_to_the_symbol_in_two_hops(row):
    opened = _file(row["opens"])
    then = _file(row["then"]) if row["then"] else opened
    symbol = row["symbol"].split(".")[-1]
    hits = [path for path, text in TEXTS.items() if row["term"].lower() in text.lower()]
    assert opened in hits
    assert len(hits) <= MAX_FILES_FOUND
    assert re.search(rf"(?:class|def) {symbol}\b|^{symbol}\b|, {symbol}\b", TEXTS[then], re.MULTILINE)
    assert then == opened or re.search(rf"\b(?:{symbol}|{then.stem})\b", TEXTS[opened])
