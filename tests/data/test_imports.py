import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from qwen35_trainer.data import character_tokenizer
from tests.patience import PATIENCE

HEAVY = ("torch", "transformers", "datasets", "reasoning_gym", "math_verify", "ray")

OFFLINE = """
import sys
from pathlib import Path
from qwen35_trainer.data import PromptSet, load_tokenizer
from qwen35_trainer.manifest.data import SourceSpec
from qwen35_trainer.manifest.model import ModelSpec

reached = []
sys.addaudithook(lambda event, arguments: reached.append(arguments) if event == "socket.getaddrinfo" else None)
base = Path(sys.argv[1])
sources = [
    SourceSpec.model_validate({"name": "files", "files": {"paths": ["a.jsonl", "b.parquet"]}}),
    SourceSpec.model_validate({"name": "gym", "gym": {"task": "chain_sum", "size": 2}}),
]
prompts = PromptSet.load(sources, base)
load_tokenizer(ModelSpec.model_validate({"name": "tiny", "source": {"path": "model"}}), base)
print(len(prompts), reached)
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout.strip()


def test_importing_data_and_rewards_loads_no_heavy_library() -> None:
    code = "import sys, qwen35_trainer.data, qwen35_trainer.rewards.scorer; print([m for m in sys.argv[1:] if m in sys.modules])"
    assert run(code, *HEAVY) == "[]"


@pytest.mark.parametrize("modules", ["function_process, qwen35_trainer.rewards.function", "scoring_process"])
def test_the_processes_of_rewards_start_without_what_reads_manifests_and_data(modules: str) -> None:
    code = f"import sys, qwen35_trainer.rewards.{modules}\nprint([m for m in sys.argv[1:] if m in sys.modules])"
    assert run(code, *HEAVY, "numpy", "pydantic") == "[]"


def test_reading_local_data_looks_up_no_host(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')
    datasets.Dataset.from_dict({"prompt": ["1+2="]}).to_parquet(tmp_path / "b.parquet")
    character_tokenizer("01").save_pretrained(tmp_path / "model")
    assert run(OFFLINE, str(tmp_path)) == "4 []"
