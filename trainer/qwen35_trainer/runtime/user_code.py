"""Checks that `module:function` exists without importing the module, which may import torch and take seconds."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

from qwen35_trainer.manifest.problems import did_you_mean


def problem_of(target: str, base: Path) -> tuple[str, str] | None:
    """Return (problem, fix) of a user's function, or None if no problem is found.

    target: the function, as `module:function`. base: the manifest's folder, in which modules are searched first. The
    function is not imported. The result is therefore also None where only an import would show the problem: for a
    compiled module, a custom finder, a star import or a module's `__getattr__`.
    """
    module, _, name = target.partition(":")
    spec, first = _found(module, [str(base), *sys.path]), module.partition(".")[0]
    if first in sys.stdlib_module_names and _found(first, [str(base)]) is not None:
        # Python has imported its own module, or would import this one instead of it.
        return f"{target}: Python's library has a module {first} too.", "Rename yours."
    if spec is None:
        if _found_elsewhere(module):
            return None
        fix = "Correct the name, put the module next to the manifest, or put its folder on PYTHONPATH."
        return f"{target}: module {module} was not found in the manifest's folder {base} or on sys.path.", fix
    file = Path(spec.origin or "")
    if file.suffix != ".py":
        return None
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        return f"{target}: {file}, line {error.lineno}: {error.msg}.", "Correct the module."
    defined = dict(_bound(tree.body))
    if name in defined:
        return _not_of_one(target, defined[name])
    if defined.keys() & {"*", "__getattr__"}:
        return None
    return f"{target}: {file} has no {name}.", did_you_mean(name, defined or ["no function"])


def _found(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module as an import would, package by package, without importing it. None if it is not found.

    path: the folders in which the first package is searched.
    """
    spec: ModuleSpec | None = None
    for number, _ in enumerate(module.split("."), start=1):
        spec = PathFinder.find_spec(".".join(module.split(".")[:number]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec


def _found_elsewhere(module: str) -> bool:
    """Return whether another finder, from an installed package, finds the first package in the module's name."""
    own = (BuiltinImporter, FrozenImporter, PathFinder)
    first = module.partition(".")[0]
    return any(finder.find_spec(first, None) is not None for finder in sys.meta_path if finder not in own)


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield (name, syntax node that defines it) for each name that a module defines outside of functions and classes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in names)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as value):
                yield name, value
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, node
            case _:
                yield from _bound(ast.iter_child_nodes(node))


def _not_of_one(target: str, node: ast.AST) -> tuple[str, str] | None:
    """Return (problem, fix) if `node` defines something that certainly cannot be called with one argument.

    Otherwise None.
    """
    match node:
        case ast.Constant():
            return f"{target} is {ast.unparse(node)}.", "Name a function."
        case ast.AsyncFunctionDef(decorator_list=[]):
            return f"{target} is a coroutine function.", "Define it with def."
        case ast.FunctionDef(decorator_list=[], args=arguments):
            positional = len(arguments.posonlyargs) + len(arguments.args)
            required = positional - len(arguments.defaults)
            keywords = sum(default is None for default in arguments.kw_defaults)
            if required > 1 or keywords or not (positional or arguments.vararg):
                shown = f"{target}({ast.unparse(arguments)})"
                return f"{shown} cannot be called with one argument.", "Let it take the inputs alone."
    return None
