"""`qwen35 render`: the objects of a manifest, or everything that is wrong with it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qwen35_operator import render
from qwen35_trainer.commands import app
from qwen35_trainer.manifest import load_manifest
from qwen35_trainer.manifest.document import parse_value

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-grpo.yaml"


@pytest.fixture
def invoke():
    return lambda *arguments: CliRunner().invoke(app, ["render", *map(str, arguments)])


@pytest.fixture
def changed(tmp_path):
    """changed(old, new) is the example with one text for another."""

    def write(old: str, new: str) -> Path:
        text = EXAMPLE.read_text()
        assert old in text
        file = tmp_path / "changed.yaml"
        file.write_text(text.replace(old, new))
        return file

    return write


def test_the_objects_come_in_the_order_in_which_they_are_created(invoke):
    result = invoke(EXAMPLE)
    assert result.exit_code == 0
    rendered = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in yaml.safe_load_all(result.stdout)]
    assert rendered == [
        ("ConfigMap", "tiny-grpo-config"),
        ("ConfigMap", "tiny-grpo-progress"),
        ("ConfigMap", "tiny-grpo-history"),
        ("ConfigMap", "tiny-grpo-control"),
        ("ServiceAccount", "tiny-grpo-trainer"),
        ("Role", "tiny-grpo-trainer"),
        ("RoleBinding", "tiny-grpo-trainer"),
        ("NetworkPolicy", "tiny-grpo"),
        ("RayJob", "tiny-grpo-1"),
    ]


def test_the_objects_name_no_owner_whose_absence_would_delete_them(invoke):
    for manifest in yaml.safe_load_all(invoke(EXAMPLE).stdout):
        assert "ownerReferences" not in manifest["metadata"]
        assert manifest["metadata"]["labels"]["rl.qwen35.io/training"] == "tiny-grpo"


@pytest.mark.parametrize(
    ("written", "option", "expected"),
    [(None, None, "default"), ("a", None, "a"), ("a", "b", "b"), (None, "b", "b")],
)
def test_the_namespace_is_the_options_or_the_manifests(written, option, expected, invoke, changed):
    file = changed("name: tiny-grpo", f"name: tiny-grpo\n  namespace: {written}") if written else EXAMPLE
    result = invoke(file, *(["--namespace", option] if option else []))
    assert {manifest["metadata"]["namespace"] for manifest in yaml.safe_load_all(result.stdout)} == {expected}


def test_what_is_printed_is_read_back_as_it_was(changed):
    """Texts that other readers of YAML take for numbers or booleans stay texts."""
    odd = ["1e-6", "0o17", "y", "on", "null", "~", "1_000", "a\nb", " x", "2026-01-01", ""]
    lines = "\n".join(f"      - {{name: V{index}, value: {value!r}}}" for index, value in enumerate(odd))
    lines = lines.replace("'a\\nb'", '"a\\nb"')
    manifests = render.objects(load_manifest(changed("  rollout:", f"  pods:\n    env:\n{lines}\n  rollout:")))
    read = [parse_value(part) for part in render.text(manifests).split("---\n")[1:]]
    assert read == list(manifests)
    env = read[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["env"]
    assert [entry["value"] for entry in env if entry["name"].startswith("V")] == odd


def test_a_manifest_with_problems_is_refused_with_all_of_them(invoke, changed):
    result = invoke(changed("  mode: FullyAsync", "  mode: FullyAsync\n  seed: x\n  wrong: 1"))
    assert result.exit_code == 2
    assert "2 problems" in result.stderr
    assert result.stdout == ""


def test_what_the_fence_refuses_is_refused_here_with_all_of_it(invoke, changed):
    pods = "  pods:\n    head: {spec: {hostNetwork: true}}\n    train: {spec: {restartPolicy: Always}}\n  rollout:"
    result = invoke(changed("  rollout:", pods))
    assert result.exit_code == 2
    assert "changed.yaml: 2 problems" in result.stderr
    assert "spec.pods.head.spec.hostNetwork" in result.stderr
    assert "spec.pods.train.spec.restartPolicy" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("publication", "field"),
    [("{transport: SharedMemory}", "transport"), ("{transport: Folder, folder: weights}", "folder")],
)
def test_what_cannot_work_in_pods_is_refused(publication, field, invoke, changed):
    result = invoke(changed("  rollout:", f"  publication: {publication}\n  rollout:"))
    assert result.exit_code == 2
    assert f"spec.publication.{field}" in result.stderr
    assert result.stdout == ""


@pytest.mark.processes
def test_neither_a_cluster_nor_its_libraries_are_needed():
    code = (
        "import sys; from qwen35_trainer.commands import app\n"
        f"app(['render', {str(EXAMPLE)!r}], standalone_mode=False)\n"
        "print([name for name in ('kubernetes', 'kopf', 'ray', 'torch') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
