"""Finds the prose of a file: docstrings, comments, messages (string constants with a space), Markdown, names of tests.

Code in backticks, fenced blocks and URLs are blanked out, line by line, so that line numbers stay right.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass

CODE_SPAN = re.compile(r"(`+)(?!`).+?\1|https?://\S+|\]\([^)\s]*\)")
FENCED_BLOCK = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
LINE_END = re.compile(r"[ \t]*\n[ \t]*")
SHELL_COMMENT = re.compile(r"(?:^|(?<=\s))#(?!!)\s?(.*)$")


@dataclass(frozen=True)
class Text:
    """A passage of prose and the line of the file on which it starts."""

    line: int
    content: str


def texts_of(source: str, suffix: str, tree: ast.Module | None) -> Iterator[Text]:
    """Yield every passage of prose in a file with this content and suffix; `tree` is the parsed content of a Python file."""
    if tree is not None:
        passages = [*_comments_of_python(source), *_strings_of(tree)]
    elif suffix == ".md":
        passages = [Text(1, FENCED_BLOCK.sub(_blank, source))]
    else:
        comments = [(number, _shell_comment(line)) for number, line in enumerate(source.splitlines(), 1)]
        passages = _blocks([(number, comment) for number, comment in comments if comment is not None])
    for passage in passages:
        yield Text(passage.line, LINE_END.sub("\n", CODE_SPAN.sub(_blank, passage.content)))


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "`", match.group())


def _shell_comment(line: str) -> str | None:
    match = SHELL_COMMENT.search(line)
    return match.group(1) if match else None


def _comments_of_python(source: str) -> list[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return _blocks([(token.start[0], token.string.lstrip("#: ")) for token in tokens if token.type == tokenize.COMMENT])


def _blocks(comments: list[tuple[int, str]]) -> list[Text]:
    """Join comments on consecutive lines, because a phrase may run over the end of a line."""
    blocks: list[Text] = []
    last_line = -1
    for line, comment in comments:
        if line == last_line + 1:
            blocks[-1] = Text(blocks[-1].line, f"{blocks[-1].content}\n{comment}")
        else:
            blocks.append(Text(line, comment))
        last_line = line
    return blocks


def _strings_of(tree: ast.Module) -> Iterator[Text]:
    parts_of_f_strings: set[int] = set()
    for node in ast.walk(tree):
        if id(node) in parts_of_f_strings:
            continue
        if isinstance(node, ast.JoinedStr):
            parts_of_f_strings.update(id(part) for part in ast.walk(node))
        if isinstance(node, ast.JoinedStr):
            yield Text(node.lineno, "".join(_plain_part(part) for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield Text(node.lineno, node.name.removeprefix("test_").replace("_", " "))


def _plain_part(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "`"
