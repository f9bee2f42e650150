"""Time to the refusal of realistic mistakes in a manifest: prints one JSON object.

    python benchmarks/refusals.py [--rounds 3]

Every mistake is one change of the tiny example, given to `qwen35 run` in a process of its own. The output has the exit code, and
the median of the seconds until the process has ended, of each; nothing may be written. Mistakes about data count too:
the data are read before Ray starts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
REWARDS = """\
def score(prompt, response, answer, metadata): return 1.0
def trl(completions, **kwargs): return [1.0]
"""


def _lora(target: str) -> dict[str, Any]:
    return {"train.lora": {"targets": ["o_proj", target]}}


def _reward(function: str) -> dict[str, Any]:
    return {"rewards": [{"type": "Function", "function": function}]}


MISTAKES: dict[str, dict[str, Any]] = {
    "tensor × pipeline does not divide": {
        "train.parallelism": {"tensor": 4, "pipeline": 3},
        "train.engine": "Megatron",
    },
    "tensorParallel 3 of 8 devices": {"accelerator.devicesPerNode": 8, "rollout.tensorParallel": 3},
    "FSDP with tensor 2": {"train.parallelism": {"tensor": 2}, "accelerator.devicesPerNode": 2},
    "GRPO with groupSize 1": {"algorithm.groupSize": 1},
    "a batch that the ranks cannot share": {"train.batch.promptsPerUpdate": 13, "accelerator.devicesPerNode": 8},
    "stalenessThreshold 6 above maxVersionLag 4": {"async": {"stalenessThreshold": 6.0, "maxVersionLag": 4}},
    "staleness in mode Colocated": {"mode": "Colocated"},
    "an unknown field": {"train.updatez": 3},
    "a field of TRL": {"train.optimizer.lr": 1e-6},
    "a wrong enumeration value": {"mode": "fully-async"},
    "VLLM": {"rollout.engine": "VLLM"},
    "GAE": {"algorithm.advantage": "GAE"},
    "a file in place of module:function": _reward("my_rewards.py"),
    "a regular expression that does not end": {"rewards": [{"type": "ExactMatch", "extract": "(unclosed"}]},
    "a regular expression that RE2 does not take": {"rewards": [{"type": "ExactMatch", "extract": "(?<=x)y"}]},
    "a reward module that is missing": _reward("nowhere:score"),
    "a reward function that is mistyped": _reward("my_rewards:scor"),
    "a reward function with TRL's signature": _reward("my_rewards:trl"),
    "a data file that is mistyped": {"data.train": [{"name": "train", "files": {"paths": ["tiny/trian.jsonl"]}}]},
    "a data field that is mistyped": {
        "data.train": [{"name": "train", "files": {"paths": ["tiny/train.jsonl"], "promptField": "question"}}]
    },
    "prompts that are too long": {"data.maxPromptTokens": 4},
    "fewer prompts than a batch": {"train.batch.promptsPerUpdate": 8192, "train.updates": None},
    "a model folder that is missing": {"model": {"name": "m", "source": {"path": "models/Qwen3.5-0.8B"}}},
    "a model folder without a tokenizer": {"model": {"name": "m", "source": {"path": "tiny"}}},
    "a LoRA target that is mistyped": _lora("q_prj"),
    "an output below a file": {},
}


def main() -> None:
    """Run every mistake, and print."""
    parser = argparse.ArgumentParser(description="Time to the refusal of realistic mistakes in a manifest.")
    parser.add_argument("--rounds", type=int, default=3, help="of each mistake [default: 3]")
    rounds = parser.parse_args().rounds
    results = {}
    with TemporaryDirectory(prefix="benchmark-refusals-") as name:
        folder = Path(name)
        shutil.copytree(EXAMPLES / "tiny", folder / "tiny")
        (folder / "my_rewards.py").write_text(REWARDS)
        (folder / "file").write_text("not a folder")
        for mistake, changes in MISTAKES.items():
            results[mistake] = _refusal(folder, changes, rounds)
    slowest = max(results, key=lambda mistake: results[mistake]["seconds"])
    accepted = [mistake for mistake, result in results.items() if result["code"] != 2 or result["written"]]
    print(json.dumps({"mistakes": results, "slowest": slowest, "not_refused": accepted}, indent=2, ensure_ascii=False))


def _refusal(folder: Path, changes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run the changed example; without changes it is given an output folder that cannot be made."""
    file, output = folder / "example.yaml", folder / ("out" if changes else "file/out")
    file.write_text(yaml.safe_dump(_changed(changes)))
    command = [sys.executable, "-m", "qwen35_trainer.cli", "run", str(file), "--output", str(output)]
    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds.append(time.monotonic() - began)
    return {
        "code": done.returncode,
        "seconds": round(median(seconds), 2),
        "written": output.exists(),
        "message": done.stderr.strip(),
    }


def _changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The tiny example with other values at these paths below its spec. None removes a field."""
    document: dict[str, Any] = yaml.safe_load((EXAMPLES / "tiny-grpo.yaml").read_text())
    for path, value in changes.items():
        *sections, field = path.split(".")
        section = document["spec"]
        for name in sections:
            section = section.setdefault(name, {})
        if value is None:
            section.pop(field, None)
        else:
            section[field] = value
    return document


if __name__ == "__main__":
    main()
