"""The faster import of transformers gives the same library."""

import json
import subprocess
import sys

import pytest

from tests.patience import PATIENCE

STATE = """
import json, sys
from transformers.utils import import_utils
import transformers.models.auto
search = getattr(import_utils, "create_import_structure_from_path")
packages = import_utils.PACKAGE_DISTRIBUTION_MAPPING
print(json.dumps({
    "classes": sorted(dir(transformers)),
    "families": sorted(dir(transformers.models)),
    "packages": {name: packages.get(name, []) for name in ("torch", "yaml", "PIL", "absent", "mistral_common")},
    "torch": import_utils.is_torch_available(),
    "searches": search.cache_info().misses,
}))
"""


def state(first: str) -> dict[str, object]:
    """What a process sees that runs `first` before it uses transformers."""
    done = subprocess.run(
        [sys.executable, "-c", first + STATE], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def light() -> dict[str, object]:
    return state("from qwen35_trainer.light_transformers import transformers\n")


def test_the_library_has_the_same_classes_model_families_and_packages(light):
    plain = state("import transformers\n")
    assert {**light, "searches": plain["searches"]} == plain
    assert light["searches"] < plain["searches"], "each folder is read once"


def test_packages_are_not_searched_by_the_import():
    code = (
        "import importlib.metadata as metadata\n"
        "def refuse(): raise AssertionError('searched')\n"
        "metadata.packages_distributions = refuse\n"
        "from qwen35_trainer.light_transformers import transformers\n"
        "transformers.PreTrainedTokenizerFast\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
