"""`qwen35` itself: what everybody tries first."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml
from typer.testing import CliRunner

from qwen35_trainer import __version__
from qwen35_trainer.commands import app
from tests.manifest.conftest import SMALL
from tests.patience import PATIENCE

COMMANDS = sorted(command.name or command.callback.__name__ for command in app.registered_commands)


def invoke(*arguments: object, stdin: str | None = None, **environment: str):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=environment, input=stdin)


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_the_version(arguments):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_is_printed_for_every_command(command, option):
    result = invoke(*filter(None, [command]), option)
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_the_list_of_commands_says_of_each_what_it_does_in_a_whole_sentence():
    listed = invoke("--help", COLUMNS="80").stdout.split("Commands:")[1].strip().splitlines()
    assert sorted(line.split()[0] for line in listed) == COMMANDS
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.processes
def test_a_shell_completes_commands():
    completion = {"_QWEN35_COMPLETE": "complete_bash", "COMP_WORDS": "qwen35 va", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['qwen35']; from qwen35_trainer.cli import main; main()"],
        env=os.environ | completion,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["validate"]), done.stderr


def test_a_manifest_that_is_nested_beyond_measure_is_refused_in_two_lines(tmp_path):
    file = tmp_path / "deep.yaml"
    file.write_text("[" * 2000 + "]" * 2000)
    result = invoke("validate", file)
    assert result.exit_code == 2
    assert "lists and mappings are nested too deeply." in result.stderr
    assert len(result.stderr.splitlines()) == 3


@pytest.mark.parametrize("namespace", ["Bad NS", "", "a" * 64, "-a", "a.b"])
def test_a_namespace_that_cannot_be_one_is_refused_by_name(tmp_path, namespace):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    result = invoke("render", file, "--namespace", namespace)
    assert result.exit_code == 2
    assert f'--namespace: "{namespace}" is not a valid namespace name.' in result.stderr


def test_a_manifest_on_standard_input_is_validated():
    assert invoke("validate", "-", stdin=yaml.safe_dump(SMALL)).stdout == "-: valid\n"
    result = invoke("validate", "-", stdin="kind: Qwen35Training\n")
    assert result.exit_code == 2
    assert result.stderr.startswith("-: ")


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_settings_of_megatron_core_that_do_not_exist_are_named_with_the_other_problems():
    settings = {"hidden_size": 8, "bias_activation_fuson": True, "cuda_graph_warmup_steps": "many"}
    train = SMALL["spec"]["train"] | {"engine": "Megatron", "overrideTransformerConfig": settings}
    result = invoke("validate", "-", stdin=yaml.safe_dump({**SMALL, "spec": {**SMALL["spec"], "train": train}}))
    assert result.exit_code == 2
    assert result.stderr.startswith("-: 3 problems\n")
    for name, text in {
        "hidden_size": "it cannot be set here: it follows from config.json in the model's folder",
        "bias_activation_fuson": "has no such setting.\n      Did you mean bias_activation_fusion",
        "cuda_graph_warmup_steps": 'expects an integer, not "many".',
    }.items():
        assert f"spec.train.overrideTransformerConfig.{name}: " in result.stderr
        assert text in result.stderr


def test_what_the_next_version_will_refuse_is_printed_and_no_error():
    manifest = {**SMALL, "spec": {**SMALL["spec"], "async": {"stallSeconds": 0.5}}}
    result = invoke("validate", "-", stdin=yaml.safe_dump(manifest))
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "-: valid\nBefore v1beta1, change:\n  spec.async.stallSeconds: 0.5 is not a whole number"
    )


def test_of_a_folder_every_training_below_it_is_validated_and_nothing_else(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "good.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "wrong.yml").write_text("kind: qwen35training\nspec: {}\n")
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\n")
    (tmp_path / "notes.txt").write_text("kind: Qwen35Training\n")
    result = invoke("validate", tmp_path)
    assert (result.exit_code, result.stdout) == (2, f"{tmp_path / 'below' / 'good.yaml'}: valid\n")
    assert f"{tmp_path / 'wrong.yml'}: " in result.stderr
    assert "kustomization" not in result.stderr


@pytest.mark.parametrize("command", ["validate", "render"])
def test_a_folder_without_a_training_is_refused(tmp_path, command):
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\n")
    result = invoke(command, tmp_path)
    assert result.exit_code == 2
    assert f"In {tmp_path}: kustomization.yaml." in result.stderr
