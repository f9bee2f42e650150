"""The check of the images reports what the table of versions does not explain."""

from pathlib import Path

from images.check import _unexplained, _wheels_of
from images.definition import definition
from images.locks import pins
from images.repository import REPOSITORY

LEFT_OUT = """\
Checked 257 packages in 2ms
Found 4 incompatibilities
The package `torch-npu` requires `torch==2.10.0+cpu`, but `2.10.0` is installed
The package `vllm-ascend` requires `arctic-inference==0.1.1`, but it's not installed
The package `vllm-ascend` requires `triton-ascend==3.2.2`, but it's not installed
The package `xgrammar` requires `triton ; platform_machine == 'x86_64' and sys_platform == 'linux'`, but it's not installed
"""
MISSING = "The package `vllm` requires `msgspec`, but it's not installed"
TOO_OLD = "The package `vllm` requires `openai>=2.0.0`, but `1.0.0` is installed"
OTHER = "The package `vllm-ascend` requires `transformers==5.5.4`, but `5.5.3` is installed"


def test_what_the_table_leaves_out_is_explained():
    assert _unexplained(LEFT_OUT, "trainer-ascend") == ""


def test_any_other_disagreement_is_reported():
    report = "\n".join([MISSING, LEFT_OUT, TOO_OLD, OTHER])
    assert _unexplained(report, "trainer-ascend") == "\n".join([MISSING, TOO_OLD, OTHER])


def test_what_one_image_leaves_out_another_must_have():
    assert "arctic-inference" in _unexplained(LEFT_OUT, "trainer-cuda")


def test_wheels_of_another_architecture_are_downloaded_without_the_packages_that_have_none(tmp_path):
    lock = definition("trainer-ascend").locks["arm64"]
    every = pins((REPOSITORY / lock).read_text())
    downloaded = pins(Path(_wheels_of(lock, tmp_path)).read_text())
    assert every.keys() - downloaded.keys() == {"cellpylib", "pycosat", "zss"}
