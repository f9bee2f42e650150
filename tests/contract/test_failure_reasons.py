"""Every exception that can end a run has a reason, every reason is used, and the documentation lists all of them."""

import ast
import builtins
from functools import cache
from pathlib import Path

import pytest

from qwen35_trainer.failure_reasons import FailureReason, reason_of, table

ROOT = Path(__file__).parents[2]
ENTRY = ("qwen35_trainer.runtime.run_command", "qwen35_trainer.runtime.link.reporter")
"""What `qwen35 run` calls; the modules that these import, at any depth, are the code of a run."""
ELSEWHERE = ("qwen35_trainer.commands", "qwen35_trainer.simulate")
"""Packages whose handlers keep no run alive: they print what has ended a command, or belong to the simulator."""


@cache
def _modules() -> dict[str, ast.Module]:
    """The modules of trainer and operator, parsed, by name."""
    trees = {}
    for root in (ROOT / "trainer", ROOT / "operator"):
        for file in root.rglob("*.py"):
            name = ".".join(file.relative_to(root).with_suffix("").parts)
            trees[name.removesuffix(".__init__")] = ast.parse(file.read_text(), str(file))
    return trees


def _imports(module: str) -> set[str]:
    names = set()
    for node in ast.walk(_modules()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names & _modules().keys()


@cache
def _modules_of_a_run() -> set[str]:
    reached, waiting = set(), set(ENTRY)
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting |= _imports(module) - reached
    return reached


@cache
def _handled() -> set[str]:
    """Names of exceptions for which a handler exists."""
    return {
        name.attr if isinstance(name, ast.Attribute) else name.id
        for module, tree in _modules().items()
        if not module.startswith(ELSEWHERE)
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for name in ast.walk(node.type)
        if isinstance(name, ast.Name | ast.Attribute)
    }


@cache
def _ancestry() -> dict[str, list[ast.ClassDef]]:
    """The exception classes in the modules of a run, by name: each with those that it extends."""
    classes = {
        node.name: node
        for module in _modules_of_a_run()
        for node in _modules()[module].body
        if isinstance(node, ast.ClassDef)
    }

    def names(kind: ast.ClassDef) -> list[str]:
        return [base.id for base in kind.bases if isinstance(base, ast.Name)]

    def ancestry(kind: ast.ClassDef) -> list[ast.ClassDef]:
        return [kind, *(other for name in names(kind) if name in classes for other in ancestry(classes[name]))]

    def is_exception(name: str) -> bool:
        builtin = getattr(builtins, name, None)
        return isinstance(builtin, type) and issubclass(builtin, BaseException)

    lines = {name: ancestry(kind) for name, kind in classes.items()}
    return {
        name: line for name, line in lines.items() if any(is_exception(base) for kind in line for base in names(kind))
    }


def _has_failure(name: str) -> bool:
    assigned = [
        target
        for kind in _ancestry()[name]
        for node in kind.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    ]
    return any(isinstance(target, ast.Name) and target.id == "failure" for target in assigned)


def _is_handled(name: str) -> bool:
    return any(kind.name in _handled() for kind in _ancestry()[name])


def test_every_exception_that_can_leave_a_run_has_a_reason():
    assert len(_ancestry()) > 25, "the modules of a run define more exceptions than these"
    without = [name for name in _ancestry() if not _has_failure(name) and not _is_handled(name)]
    assert without == [], "no handler names these, so they end a run: give each a class attribute `failure`"


def test_the_check_would_find_a_class_that_loses_its_reason():
    certain = {name for name in _ancestry() if _has_failure(name) and not _is_handled(name)}
    assert {
        "BoundBroken",
        "NotFinite",
        "PackingInexact",
        "JournalNotWritten",
        "NothingToTrain",
    } <= certain
    # A replica handles it where another replica served the version, and else it leaves the replica.
    assert _has_failure("WeightsDamaged")


def test_every_reason_is_used():
    used = set()
    for module, tree in _modules().items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "FailureReason"
            ):
                used.add(FailureReason[node.attr])
            elif isinstance(node, ast.Constant) and module.startswith("qwen35_operator."):
                used.add(node.value)
    assert set(FailureReason) - used == set()


def test_words_are_unique_and_fit_into_a_report():
    assert len({str(reason) for reason in FailureReason}) == len(FailureReason)
    assert all(reason.isalpha() and len(reason) <= 128 for reason in FailureReason)


def test_meanings_are_sentences():
    for reason in FailureReason:
        assert reason.meaning.endswith("."), reason
        assert reason.rationale.endswith("."), reason


def test_the_documentation_has_the_table():
    assert table() in (ROOT / "docs/failure-modes.md").read_text(), f"put this into docs/failure-modes.md:\n{table()}"


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("x"), FailureReason.UNEXPECTED_ERROR),
        (MemoryError(), FailureReason.OUT_OF_MEMORY),
        (OutOfMemoryError("CUDA"), FailureReason.OUT_OF_MEMORY),
        (ExceptionGroup("", [ExceptionGroup("", [MemoryError(), ValueError()])]), FailureReason.OUT_OF_MEMORY),
    ],
)
def test_the_reason_of_an_exception_of_another_library(error, reason):
    assert reason_of(error) is reason
