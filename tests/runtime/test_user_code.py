"""Losses and advantages of the user's own: found without an import, and trained with."""

import pytest

from qwen35_trainer.progress.records import UpdateRecord
from qwen35_trainer.runtime.user_code import wrong_with

MODULE = """
import torch_is_not_imported
from elsewhere import given as taken

if True:
    def loss(inputs, scale=1.0): ...
else:
    other = loss

def two(inputs, more): ...
def named(inputs, *, more): ...
@torch_is_not_imported.decorated
def decorated(a, b): ...
"""
FINE = ["mine:loss", "mine:other", "mine:taken", "mine:decorated", "pack.inner:loss", "starred:anything", "json:loads"]
WRONG = {
    "no_such:loss": ("there is no module no_such in the manifest's folder", "PYTHONPATH"),
    "pack.no_such:loss": ("there is no module pack.no_such", "PYTHONPATH"),
    "mine.inner:loss": ("there is no module mine.inner", "PYTHONPATH"),
    "mine:los": ("mine.py has no los.", "Did you mean loss?"),
    "mine:two": ("mine:two(inputs, more) cannot be called with one argument.", "the inputs alone"),
    "mine:named": ("mine:named(inputs, *, more) cannot be called with one argument.", "the inputs alone"),
    "broken:loss": ("broken.py, line 2: ", "Correct the module."),
}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("\ndef loss(:\n")
    (tmp_path / "starred.py").write_text("from mine import *\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (tmp_path / "pack" / "inner.py").write_text("def loss(inputs): ...\n")
    return tmp_path


@pytest.mark.parametrize("target", FINE)
def test_a_function_that_is_there_is_found_without_an_import(base, target):
    assert wrong_with(target, base) is None


@pytest.mark.parametrize("target", WRONG)
def test_a_function_that_cannot_be_called_is_named_with_the_fix(base, target):
    message, fix = WRONG[target]
    found = wrong_with(target, base)
    assert found is not None
    assert (message in found[0], fix in found[1]) == (True, True), found


OWN = """
def loss(inputs):
    return -inputs.advantages * inputs.log_probs

def advantage(inputs):
    return inputs.rewards[:, None].expand(inputs.mask.shape)
"""


@pytest.mark.parametrize(("function", "code"), [("own:loss", 0), ("own:lost", 2)])
def test_a_run_trains_with_functions_beside_its_manifest(local, write, tmp_path, function, code):
    (tmp_path / "own.py").write_text(OWN)
    algorithm = {"advantage": "Function", "advantageFunction": "own:advantage", "groupSize": 4}
    ended = local.run(write(tmp_path, {"algorithm": algorithm | {"loss": {"type": "Function", "function": function}}}))
    assert ended.code == code, ended.err
    assert len(ended.of(UpdateRecord)) == (3 if code == 0 else 0)
    if code == 2:
        assert "spec.algorithm.loss.function: own:lost: " in ended.err
        assert not ended.folder.exists()
