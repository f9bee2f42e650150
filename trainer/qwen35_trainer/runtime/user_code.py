"""Whether `module:function` is there, without importing the module: it may import torch, which takes seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from qwen35_trainer.spec.problems import did_you_mean


def wrong_with(target: str, base: Path) -> tuple[str, str] | None:
    """What is wrong with a function of one argument, and what to do. None for one that is there, and for one that only an
    import could find: in a compiled module, or from a star import.

    base: the manifest's folder, where modules are looked for first.
    """
    module, _, name = target.partition(":")
    found = _found(module, [str(base), *sys.path])
    if found is None:
        fix = "Correct the name, put the module beside the manifest, or put its folder on PYTHONPATH."
        return f"{target}: there is no module {module} in the manifest's folder {base}, nor on sys.path.", fix
    file = Path(found.origin or "")
    if file.suffix != ".py":
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return f"{target}: {file}, line {error.lineno}: {error.msg}.", "Correct the module."
    defined = dict(_defined(tree.body))
    if name in defined:
        node = defined[name]
        return _not_of_one(target, node) if isinstance(node, ast.FunctionDef) else None
    if "*" in defined:
        return None
    return f"{target}: {file} has no {name}.", did_you_mean(name, defined or ["no function"])


def _found(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """As an import finds it, package by package, without importing any."""
    found: ModuleSpec | None = None
    for number, _ in enumerate(module.split("."), start=1):
        found = PathFinder.find_spec(".".join(module.split(".")[:number]), path)
        if found is None:
            return None
        path = list(found.submodule_search_locations or ())
    return found


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module gets by its statements, also those in `if` and `try`."""
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name, node) for alias in names)
            case ast.Assign(targets=targets):
                yield from ((part.id, node) for part in targets if isinstance(part, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If(body=inner, orelse=other):
                yield from _defined([*inner, *other])
            case ast.Try(body=inner, handlers=handlers, orelse=other):
                yield from _defined([*inner, *other, *(part for handler in handlers for part in handler.body)])


def _not_of_one(target: str, node: ast.FunctionDef) -> tuple[str, str] | None:
    arguments = node.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    keywords = sum(default is None for default in arguments.kw_defaults)
    if node.decorator_list or (required <= 1 and keywords == 0 and (positional >= 1 or arguments.vararg)):
        return None
    return f"{target}({ast.unparse(arguments)}) cannot be called with one argument.", "Let it take the inputs alone."
