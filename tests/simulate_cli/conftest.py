"""A manifest of two pools that is simulated in a fraction of a second, and the two commands."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from qwen35_trainer.commands import app

SPEC: dict[str, Any] = {
    "accelerator": {"profile": "NVIDIA", "devicesPerNode": 2},
    "model": {"name": "Qwen/Qwen3.5-3B", "source": {"path": "/models/qwen"}},
    "data": {"train": [{"name": "sums", "gym": {"task": "basic_arithmetic", "size": 64}}], "maxResponseTokens": 4000},
    "rewards": [{"type": "Gym"}],
    "algorithm": {"groupSize": 4},
    "rollout": {"nodes": 2, "maxSequencesPerReplica": 8},
    "train": {"nodes": 4, "updates": 10, "batch": {"promptsPerUpdate": 4}},
    "async": {"stalenessThreshold": 1.0, "maxVersionLag": 3},
}


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture
def run_command() -> Callable[..., CommandResult]:
    """run_command("simulate", "--json") runs the command and returns its result. It never ends in a traceback."""

    def invoke(*arguments: object) -> CommandResult:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.stderr
        return CommandResult(result.exit_code, result.stdout, result.stderr)

    return invoke


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """manifest(rollout={"nodes": 4}, mode="SFT") is the manifest with these sections changed; None takes one out."""

    def write(**changes: Any) -> Path:
        spec: dict[str, Any] = dict(SPEC)
        for name, value in changes.items():
            key = name.rstrip("_")
            merged = {**spec[key], **value} if isinstance(value, dict) and key in spec else value
            spec = {**spec, key: merged}
        document = {
            "apiVersion": "rl.qwen35.io/v1alpha1",
            "kind": "Qwen35Training",
            "metadata": {"name": "small"},
            "spec": {key: value for key, value in spec.items() if value is not None},
        }
        path = tmp_path / "small.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write
