"""Checks names: no pronoun or bare participle for a variable, no adjective for a constant, one class per name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

# `left` next to `right` is a side, and passes.
PRONOUNS = frozenset({"one", "found", "known", "said", "told", "given", "mine", "about", "asked", "left"})
ADJECTIVES = re.compile(
    "(LONGEST|SHORTEST|GREATEST|LARGEST|SMALLEST|LEAST|FEWEST|MOST|LATEST|OLDEST|KEPT|ENOUGH|WORTH)(_.*)?"
    "|AHEAD|AGAIN|SETTLE|GRACE|FIRST_WAIT"
)
# Names that several modules may define, each with the reason. Private classes always may: nobody imports them.
SHARED_CLASS_NAMES: dict[str, str] = {}

type Place = tuple[Path, int]


def pronouns_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and a message for every variable, argument or attribute whose name is a pronoun or bare participle."""
    bound = list(_bound_names(tree))
    sides = any(name == "right" for _, name in bound)
    for line, name in bound:
        if name in PRONOUNS and not (name == "left" and sides):
            yield line, f"`{name}` is a pronoun or participle: name the variable after the thing"


def _bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def adjectives_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and a message for every constant that is named by an adjective or a superlative."""
    for line, name in _top_level_names(tree, ast.Assign, ast.AnnAssign):
        if ADJECTIVES.fullmatch(name.strip("_")):
            yield line, f"{name}: name the constant with a noun and its unit, such as MAX_BACKOFF_SECONDS"


def classes_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of every class and type alias at the top level of a module."""
    for line, name in _top_level_names(tree, ast.ClassDef, ast.TypeAlias, ast.Assign):
        if name[0].isupper() and not name.isupper():
            yield line, name


def _top_level_names(tree: ast.Module, *kinds: type[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in tree.body:
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.TypeAlias):
            yield node.lineno, node.name.id
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((node.lineno, target.id) for target in targets if isinstance(target, ast.Name))


def collisions(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Path, int, str]]:
    """Yield the file, the line and a message for every class whose name another module also defines."""
    places: defaultdict[str, list[Place]] = defaultdict(list)
    for path, tree in trees.items():
        for line, name in classes_in(tree):
            places[name].append((path, line))
    for name, definitions in places.items():
        if name in SHARED_CLASS_NAMES:
            continue
        for path, line in definitions:
            others = sorted({str(other) for other, _ in definitions} - {str(path)})
            if others:
                yield path, line, f"class {name} is also defined in {', '.join(others)}"
