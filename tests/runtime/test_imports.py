"""What each process must not import: the core stays light, and the driver leaves torch to its workers."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qwen35_trainer
from qwen35_trainer.engines.train_batch import TrainBatch
from qwen35_trainer.weights.published import PublishedWeights
from qwen35_trainer.weights.segment import SegmentHandle
from qwen35_trainer.weights.weight_manifest import TensorPart, WeightLayout, WeightManifest
from tests.patience import PATIENCE

TINY = Path(__file__).parents[2] / "examples" / "tiny-grpo.yaml"
REWARDS = "[{type: Function, function: 'json:nothing'}]"
PACKAGES = Path(qwen35_trainer.__file__).parent
CORE = [name for name in ("manifest", "pipeline", "catalog", "simulate") if (PACKAGES / name / "__init__.py").is_file()]


def imported_by(code: str, *watched: str, stdin: bytes = b"") -> set[str]:
    """Which of `watched` a new interpreter has imported after `code`."""
    script = f"{code}\nimport sys\nprint(*sorted(set({list(watched)!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", script], input=stdin, capture_output=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return set(done.stdout.decode().split())


@pytest.mark.parametrize("package", CORE)
def test_the_core_imports_without_frameworks(package):
    walk = (
        f"import pkgutil, importlib, qwen35_trainer.{package} as package\n"
        "for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'): importlib.import_module(module.name)"
    )
    arrays = () if package == "simulate" else ("numpy",)
    assert imported_by(walk, "torch", "ray", "vllm", "kubernetes", "transformers", *arrays) == set()


def test_the_driver_imports_without_torch():
    assert imported_by("import qwen35_trainer.runtime.driver", "torch", "vllm", "transformers") == set()


def test_the_driver_reads_jobs_batches_and_publications_without_torch(write, tmp_path):
    from qwen35_trainer.manifest import load_manifest
    from qwen35_trainer.runtime.folder import RunFolder
    from qwen35_trainer.runtime.prepare import prepare

    manifest = load_manifest(write(tmp_path))
    job, _ = prepare(manifest, base=tmp_path, folder=RunFolder(tmp_path / "out"), resume=None, started=0.0)
    layout = WeightLayout.of([("weight", (2, 2), "float32")])
    lengths, tokens = np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int32)
    sent = [
        job,
        PublishedWeights(
            WeightManifest(1, layout, (TensorPart(0, 0, 16, 0),)), SegmentHandle("weights", 16, ((1, 3),))
        ),
        TrainBatch(tokens, lengths, tokens, lengths, np.ones(1, dtype=np.bool_)),
    ]
    code = "import pickle, sys, qwen35_trainer.runtime.driver\nassert len(pickle.load(sys.stdin.buffer)) == 3"
    assert imported_by(code, "torch", "vllm", stdin=pickle.dumps(sent)) == set()


@pytest.mark.parametrize("arguments", [["validate", "nowhere.yaml"], ["export", "nowhere", "--output", "out"]])
def test_what_does_not_exist_is_refused_without_a_framework(arguments):
    code = (
        "import qwen35_trainer.commands\n"
        "from typer.testing import CliRunner\n"
        f"assert CliRunner().invoke(qwen35_trainer.commands.app, {arguments!r}).exit_code == 2"
    )
    assert imported_by(code, "torch", "ray", "transformers", "kubernetes") == set()


def test_what_a_manifest_names_wrongly_is_refused_without_ray_or_torch(tmp_path):
    arguments = ["run", str(TINY), "--output", str(tmp_path / "out"), "--set", f"rewards={REWARDS}"]
    code = (
        "import qwen35_trainer.commands\n"
        "from typer.testing import CliRunner\n"
        f"refused = CliRunner().invoke(qwen35_trainer.commands.app, {arguments!r})\n"
        "assert (refused.exit_code, 'has no' in refused.stderr) == (2, True), refused.output"
    )
    assert imported_by(code, "torch", "ray", "transformers", "datasets") == set()
