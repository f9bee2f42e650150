"""Check the links of the Markdown files: `python -m tools.links`, a part of `make lint`.

A link to a file or heading of the repository must resolve, and so must a path in backticks, such as `runtime/loop.py`: a file whose
path ends with it must exist. docs/index.md, which is the navigation of the site, must link to every page of docs/. Links to other hosts
are not followed, so the check needs no network and takes less than a second.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = ("*.md", "docs/**/*.md", "images/*.md")
LINK: Final = re.compile(r"\]\((?P<inline>[^()\s]+)\)|^\[[^\]]+\]: (?P<reference>\S+)$", re.MULTILINE)
SOURCE: Final = re.compile(r"`(?P<path>(?:[\w.-]+/)+[\w.-]+\.(?:py|sh|yaml))`")
CODE: Final = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
FENCED: Final = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
HEADING: Final = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
OTHER_HOST: Final = re.compile(r"[a-z]+:")


def main() -> int:
    files = tracked_files(ROOT)
    problems = [problem for page in pages(ROOT) for problem in (*broken_links(page), *missing_sources(page, files))]
    problems += unlisted_pages(ROOT / "docs")
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


def pages(root: Path) -> list[Path]:
    """Return every Markdown file whose links are checked."""
    return sorted(page for pattern in PAGES for page in root.glob(pattern))


def tracked_files(root: Path) -> list[str]:
    """Return the paths of all files that git tracks."""
    command = ["git", "-C", str(root), "ls-files"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()  # noqa: S603


def missing_sources(page: Path, files: list[str]) -> Iterator[str]:
    """Yield a message for each path in backticks with which no path of `files` ends."""
    text = FENCED.sub(_same_number_of_lines, page.read_text())
    for match in SOURCE.finditer(text):
        path = match["path"]
        if not any(f"/{file}".endswith(f"/{path}") for file in files):
            yield f"{page}:{text.count('\n', 0, match.start()) + 1}: {path}: the file does not exist"


def unlisted_pages(docs: Path) -> list[str]:
    """Return a message for each page of the folder that its index.md does not link to."""
    targets = {match["inline"] for match in LINK.finditer((docs / "index.md").read_text())} | {"index.md"}
    unlisted = [page for page in sorted(docs.rglob("*.md")) if page.relative_to(docs).as_posix() not in targets]
    return [f"{page}: index.md does not list this page" for page in unlisted]


def broken_links(page: Path) -> Iterator[str]:
    """Yield a message for each link of `page` whose file or heading does not exist."""
    text = CODE.sub(_same_number_of_lines, page.read_text())
    for match in LINK.finditer(text):
        target: str = match["inline"] or match["reference"]
        if OTHER_HOST.match(target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        place = f"{page}:{text.count('\n', 0, match.start()) + 1}"
        if not file.exists():
            yield f"{place}: {target}: the file does not exist"
        elif anchor and anchor not in anchors(file.read_text()):
            yield f"{place}: {target}: {file.name} has no such heading"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    repetitions: Counter[str] = Counter()
    names = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{repetitions[name]}" if repetitions[name] else name)
        repetitions[name] += 1
    return names


def _same_number_of_lines(code: re.Match[str]) -> str:
    return "\n" * code[0].count("\n")


if __name__ == "__main__":
    sys.exit(main())
