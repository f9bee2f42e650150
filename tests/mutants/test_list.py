"""Every mutant of the list applies to the present code, and names a test that exists."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.every import MUTANTS
from tests.mutants.mutant import DoesNotApply, Mutant

ROOT = Path(__file__).parents[2]
PACKAGES = {"pipeline": "trainer", "reconcile": "operator", "engines": "trainer", "weights": "trainer"}

each = pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


SILENT = ("mutants", "forks")
"""Folders that name packages without testing them: this list, and what the fork server imports ahead."""


@cache
def importers() -> dict[str, set[str]]:
    """By package: the test folders with a file that names it."""
    killers: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for path in (ROOT / "tests").glob("*/**/*.py"):
        text, folder = path.read_text(), path.relative_to(ROOT).parts[1]
        for package, product in PACKAGES.items():
            if folder not in SILENT and f"qwen35_{product}.{package}" in text:
                killers[package].add(folder)
    return killers


def test_there_are_ten_for_each_package_and_each_has_a_sentence_of_its_own():
    assert Counter(mutant.package for mutant in MUTANTS) == dict.fromkeys(PACKAGES, 10)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(mutant.name.endswith(".") for mutant in MUTANTS)


@each
def test_it_applies_once_and_changes_what_the_code_says(mutant):
    before = (ROOT / mutant.file).read_text()
    after = mutant.applied_to(before)
    assert ast.dump(ast.parse(after)) != ast.dump(parsed(ROOT / mutant.file))
    with pytest.raises(DoesNotApply):
        mutant.applied_to(before + mutant.old)


@each
def test_its_killer_is_a_test_of_a_folder_that_imports_the_package(mutant):
    file, _, test = mutant.killer.partition("::")
    assert file.startswith(tuple(f"{folder}/" for folder in mutant.folders))
    name, bracket, _ = test.partition("[")
    [definition] = [node for node in parsed(ROOT / file).body if getattr(node, "name", None) == name]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    assert name.startswith("test_")
    parametrized = any("parametrize" in ast.unparse(decorator) for decorator in definition.decorator_list)
    assert parametrized or not bracket


@pytest.mark.parametrize("package", PACKAGES)
def test_its_folders_are_all_that_import_the_package(package):
    for mutant in (mutant for mutant in MUTANTS if mutant.package == package):
        assert importers()[package] <= {folder.removeprefix("tests/") for folder in mutant.folders}
        assert all((ROOT / folder).is_dir() for folder in mutant.folders)


def test_a_text_that_is_not_there_does_not_apply():
    absent = Mutant("Nothing.", "a/b/c/d.py", "no such text", "", "tests/a.py::test", ())
    with pytest.raises(DoesNotApply, match=r"a/b/c/d.py contains the text to replace 0 times"):
        absent.applied_to("another text")
