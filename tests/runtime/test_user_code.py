"""Losses and advantages of the user: found without an import, and trained with."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from qwen35_trainer.progress.records import UpdateRecord
from qwen35_trainer.runtime.preflight import problem_of

MODULE = """
import torch_is_not_imported
from elsewhere import given as taken

if True:
    def loss(inputs, scale=1.0): ...
else:
    other = loss

first, second = made()
with torch_is_not_imported.context() as entered:
    def within(inputs): ...
rate = 0.5

def two(inputs, more): ...
async def waiting(inputs): ...
def named(inputs, *, more): ...
@torch_is_not_imported.decorated
def decorated(a, b): ...
"""
FINE = [
    *("mine:loss", "mine:other", "mine:taken", "mine:decorated", "mine:second", "mine:entered", "mine:within"),
    *("pack.inner:loss", "starred:anything", "lazy:anything", "json:loads", "found_by_a_finder:anything"),
]
WRONG = {
    "no_such:loss": ("module no_such was not found in the manifest's folder", "PYTHONPATH"),
    "pack.no_such:loss": ("module pack.no_such was not found", "PYTHONPATH"),
    "mine.inner:loss": ("module mine.inner was not found", "PYTHONPATH"),
    "mine:los": ("mine.py has no los.", "Did you mean loss?"),
    "mine:two": ("mine:two(inputs, more) cannot be called with one argument.", "the inputs alone"),
    "mine:named": ("mine:named(inputs, *, more) cannot be called with one argument.", "the inputs alone"),
    "mine:waiting": ("mine:waiting is a coroutine function.", "Define it with def."),
    "mine:rate": ("mine:rate is 0.5.", "Name a function."),
    "html:loss": ("html:loss: Python's library has a module html too.", "Rename yours."),
    "broken:loss": ("broken.py, line 2: ", "Correct the module."),
}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("\ndef loss(:\n")
    (tmp_path / "starred.py").write_text("from mine import *\n")
    (tmp_path / "html.py").write_text("def loss(inputs): ...\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (tmp_path / "pack" / "inner.py").write_text("def loss(inputs): ...\n")
    return tmp_path


class Finder:
    """As an editable installation adds one."""

    @staticmethod
    def find_spec(name, path, target=None):
        return ModuleSpec(name, None) if name == "found_by_a_finder" else None


@pytest.fixture(autouse=True)
def finder(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])


@pytest.mark.parametrize("target", FINE)
def test_a_function_that_is_there_is_found_without_an_import(base, target):
    assert problem_of(target, base) is None


@pytest.mark.parametrize("target", WRONG)
def test_a_function_that_cannot_be_called_is_named_with_the_fix(base, target):
    message, fix = WRONG[target]
    problem = problem_of(target, base)
    assert problem is not None
    assert (message in problem[0], fix in problem[1]) == (True, True), problem


OWN = """
def loss(inputs):
    return -inputs.advantages * inputs.log_probs

def advantage(inputs):
    return inputs.rewards[:, None].expand(inputs.mask.shape)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("function", "code"), [("own:loss", 0), ("own:lost", 2)])
def test_a_run_trains_with_functions_next_to_its_manifest(local, write, tmp_path, function, code):
    (tmp_path / "own.py").write_text(OWN)
    algorithm = {"advantage": "Function", "advantageFunction": "own:advantage", "groupSize": 4}
    ended = local.run(write(tmp_path, {"algorithm": algorithm | {"loss": {"type": "Function", "function": function}}}))
    assert ended.code == code, ended.err
    assert len(ended.of(UpdateRecord)) == (3 if code == 0 else 0)
    if code == 2:
        assert "spec.algorithm.loss.function: own:lost: " in ended.err
        assert not ended.folder.exists()
